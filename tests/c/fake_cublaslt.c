/* A stand-in for libcublasLt with the functions that vendor/cublaslt.c calls. */
#include "fake_library.h"

#include <math.h>

enum { SUCCESS = 0, INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15, ALGO = 0xA160, NUM_ALGORITHMS = 3 };
enum { BIAS_LOADS = 16, WORKSPACE = 256 }; /* bytes: alignments that algorithms assume without a declaration */
enum { DEFAULT = 1, RELU = 2, BIAS = 4, GELU = 32 }; /* epilogues */

typedef struct desc {
  int compute, scale;
  int32_t transposed[2], epilogue;
  const void *bias;
} desc;
typedef struct layout {
  int type;
  uint64_t rows, columns;
  int64_t leading;
  int32_t batches;
  int64_t stride;
} layout;
typedef struct preference {
  uint64_t workspace;
  uint32_t reductions, alignment[4];
} preference;
typedef struct heuristic {
  uint64_t algo[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
} heuristic;

/* For the test: arguments of the last search and of the last call. */
int64_t fake_compute, fake_reductions, fake_alignments[4], fake_epilogue, fake_algorithm;

/* Set by tests of CUDA graphs; fake_copy and fake_wait are driver functions. With fake_copy, a call enqueues a copy of
 * B, correct for products with an identity matrix. With fake_wait, a call also waits for the stream, which libraries
 * must not do. With fake_varies, every second call enqueues its copy twice. */
int64_t fake_varies;
int (*fake_copy)(uint64_t dst, uint64_t src, size_t bytes, void *stream);
int (*fake_wait)(void *stream);

int cublasLtCreate(void **handle) {
  MAY_FAIL();
  *handle = calloc(1, sizeof(exclusive));
  fake_handles++;
  return SUCCESS;
}
int cublasLtDestroy(void *handle) {
  free(handle);
  fake_handles--;
  return SUCCESS;
}
size_t cublasLtGetVersion(void) { return 130102; }
const char *cublasLtGetStatusString(int status) {
  return status == INVALID_VALUE ? "invalid value" : status == EXECUTION_FAILED ? "execution failed" : "not supported";
}

static int made(void *object, void **out) {
  *out = object;
  fake_descriptors++;
  return SUCCESS;
}
static int destroyed(void *object) {
  free(object);
  fake_descriptors--;
  return SUCCESS;
}
/* Copies an attribute's value; fails unless it has `expected` bytes. */
static int take(void *to, size_t expected, const void *value, size_t bytes) {
  if (bytes != expected)
    return INVALID_VALUE;
  memcpy(to, value, bytes);
  return SUCCESS;
}

int cublasLtMatmulDescCreate(void **out, int compute, int scale) {
  MAY_FAIL();
  desc *d = calloc(1, sizeof *d);
  d->compute = compute;
  d->scale = scale;
  d->epilogue = DEFAULT;
  return made(d, out);
}
int cublasLtMatmulDescDestroy(void *object) { return destroyed(object); }
int cublasLtMatmulDescSetAttribute(desc *d, int attribute, const void *value, size_t bytes) {
  MAY_FAIL();
  switch (attribute) {
  case 3: /* TRANSA */
  case 4: /* TRANSB */
    return take(&d->transposed[attribute - 3], 4, value, bytes);
  case 7: /* EPILOGUE */
    return take(&d->epilogue, 4, value, bytes);
  case 8: /* BIAS_POINTER */
    return take(&d->bias, 8, value, bytes);
  default:
    return INVALID_VALUE;
  }
}
int cublasLtMatrixLayoutCreate(void **out, int type, uint64_t rows, uint64_t columns, int64_t leading) {
  MAY_FAIL();
  layout *l = calloc(1, sizeof *l);
  *l = (layout){type, rows, columns, leading, 1, 0};
  return made(l, out);
}
int cublasLtMatrixLayoutDestroy(void *object) { return destroyed(object); }
int cublasLtMatrixLayoutSetAttribute(layout *l, int attribute, const void *value, size_t bytes) {
  MAY_FAIL();
  switch (attribute) {
  case 5: /* BATCH_COUNT */
    return take(&l->batches, 4, value, bytes);
  case 6: /* STRIDED_BATCH_OFFSET */
    return take(&l->stride, 8, value, bytes);
  default:
    return INVALID_VALUE;
  }
}
int cublasLtMatmulPreferenceCreate(void **out) {
  MAY_FAIL();
  preference *p = calloc(1, sizeof *p);
  p->reductions = 7;
  return made(p, out);
}
int cublasLtMatmulPreferenceDestroy(void *object) { return destroyed(object); }
int cublasLtMatmulPreferenceSetAttribute(preference *p, int attribute, const void *value, size_t bytes) {
  MAY_FAIL();
  switch (attribute) {
  case 1: /* MAX_WORKSPACE_BYTES */
    return take(&p->workspace, 8, value, bytes);
  case 3: /* REDUCTION_SCHEME_MASK */
    return take(&p->reductions, 4, value, bytes);
  case 5: /* MIN_ALIGNMENT_A_BYTES and B, C, D */
  case 6:
  case 7:
  case 8:
    return take(&p->alignment[attribute - 5], 4, value, bytes);
  default:
    return INVALID_VALUE;
  }
}

static element type_of(const layout *l) {
  return l->type == 0 ? FLOAT32 : l->type == 2 ? FLOAT16 : l->type == 14 ? BFLOAT16 : UNKNOWN;
}

static int valid(const layout *l, uint64_t rows, uint64_t columns) {
  return type_of(l) != UNKNOWN && l->rows == rows && l->columns == columns && l->leading >= (int64_t)rows;
}
static int same_size(const layout *c, const layout *out) {
  return c->type == out->type && c->rows == out->rows && c->columns == out->columns && c->batches == out->batches &&
         valid(c, out->rows, out->columns);
}
/* Whether the layouts, all column-major, fit each other: d is m x n, a is m x k, b is k x n, or transposed. */
static int fits(const desc *d, const layout *a, const layout *b, const layout *out) {
  const uint64_t m = out->rows, n = out->columns, k = d->transposed[0] ? a->rows : a->columns;
  const int activation = d->epilogue & ~BIAS, bias = d->epilogue & BIAS;
  return (d->epilogue == DEFAULT || (d->epilogue && !(d->epilogue & ~(RELU | GELU | BIAS)))) &&
         activation != (RELU | GELU) && !bias == !d->bias && a->type == out->type && b->type == out->type &&
         d->transposed[0] <= 1 && d->transposed[1] <= 1 && d->scale == 0 &&
         (d->transposed[0] ? valid(a, k, m) : valid(a, m, k)) && (d->transposed[1] ? valid(b, n, k) : valid(b, k, n)) &&
         valid(out, m, n) && a->batches == out->batches && b->batches == out->batches;
}

enum { CALL_BYTES = 64 };
static void describe(char text[CALL_BYTES], const desc *d, const layout *c, const layout *out) {
  snprintf(text, CALL_BYTES, "product%s%s%s%s_%s", out->batches > 1 ? "_batched" : "",
           d->epilogue & BIAS ? "_bias" : "", c != out ? "_residual" : "",
           d->epilogue & RELU   ? "_relu"
           : d->epilogue & GELU ? "_gelu"
                                : "",
           name_of(type_of(out)));
}

int cublasLtMatmulAlgoGetHeuristic(void *handle, const desc *d, const layout *a, const layout *b, const layout *c,
                                   const layout *out, const preference *p, int requested, heuristic *results,
                                   int *found) {
  MAY_FAIL();
  if (!handle || requested < 1 || !same_size(c, out) || !fits(d, a, b, out))
    return INVALID_VALUE;
  char call[CALL_BYTES];
  describe(call, d, c, out);
  if (has_fault("refused", call))
    return NOT_SUPPORTED;
  fake_searches++;
  fake_reductions = p->reductions;
  for (int i = 0; i < 4; i++)
    fake_alignments[i] = p->alignment[i];
  for (*found = 0; *found < requested && *found < NUM_ALGORITHMS; ++*found)
    results[*found] = (heuristic){.algo = {ALGO, (uint64_t)*found, p->alignment[0], p->alignment[1], p->alignment[2],
                                           p->alignment[3], p->workspace},
                                  .workspace = p->workspace};
  return SUCCESS;
}

static float finished(const desc *d, float value) {
  if (d->epilogue & RELU)
    return value > 0 ? value : 0; /* NaN gives 0 as well, as with cuBLASLt */
  if (d->epilogue & GELU)
    return 0.5F * value * (1 + tanhf(0.7978845608F * (value + 0.044715F * value * value * value)));
  return value;
}

static int multiply(exclusive *handle, const desc *d, const float *alpha, const void *a, const layout *a_layout,
                    const void *b, const layout *b_layout, const float *beta, const void *c, const layout *c_layout,
                    void *out, const layout *out_layout, const uint64_t *algo, void *workspace, size_t workspace_bytes,
                    void *stream) {
  const char *function = "cublasLtMatmul";
  check_alignment(function, "A", a, algo[2]);
  check_alignment(function, "B", b, algo[3]);
  check_alignment(function, "C", c, algo[4]);
  check_alignment(function, "D", out, algo[5]);
  check_alignment(function, "bias", d->epilogue & BIAS ? d->bias : NULL, BIAS_LOADS);
  check_alignment(function, "workspace", workspace, WORKSPACE);
  if (!handle || workspace_bytes < algo[6] || !fits(d, a_layout, b_layout, out_layout) ||
      !same_size(c_layout, out_layout) || (c == out && c_layout != out_layout) || (c == out) != (*beta == 0) ||
      algo[0] != ALGO || !fake_translate((uint64_t)(uintptr_t)workspace, workspace_bytes))
    return INVALID_VALUE;
  if (!can_execute(handle, stream))
    return NOT_SUPPORTED;
  char call[CALL_BYTES];
  describe(call, d, c_layout, out_layout);
  if (has_fault("failing", call))
    return EXECUTION_FAILED;
  fake_runs++;
  fake_compute = d->compute;
  fake_epilogue = d->epilogue;
  fake_algorithm = (int64_t)algo[1];
  take_time(fake_algorithm);
  if (fake_wait)
    fake_wait(stream);
  if (fake_copy && fake_varies && fake_runs % 2)
    fake_copy((uint64_t)(uintptr_t)out, (uint64_t)(uintptr_t)b, out_layout->rows * out_layout->columns * 4, stream);
  if (fake_copy)
    return fake_copy((uint64_t)(uintptr_t)out, (uint64_t)(uintptr_t)b, out_layout->rows * out_layout->columns * 4,
                     stream)
               ? NOT_SUPPORTED
               : SUCCESS;
  const element type = type_of(out_layout);
  const int64_t m = (int64_t)out_layout->rows, n = (int64_t)out_layout->columns;
  const int64_t k = (int64_t)(d->transposed[0] ? a_layout->rows : a_layout->columns);
  const void *bias = d->epilogue & BIAS ? translate(d->bias, type, (size_t)m) : NULL;
  for (int64_t batch = 0; batch < out_layout->batches; batch++) {
    const void *x = translate(at(type, a, batch * a_layout->stride), type, 1);
    const void *y = translate(at(type, b, batch * b_layout->stride), type, 1);
    const void *old = translate(at(type, c, batch * c_layout->stride), type, (size_t)(c_layout->leading * (n - 1) + m));
    void *z = translate(at(type, out, batch * out_layout->stride), type, (size_t)(out_layout->leading * (n - 1) + m));
    float *columns = malloc((size_t)(m * k + m) * sizeof *columns), *totals = columns + m * k; /* [k][m], [m] */
    for (int64_t l = 0; l < k; l++)
      for (int64_t i = 0; i < m; i++)
        columns[l * m + i] = load(type, x, d->transposed[0] ? l + i * a_layout->leading : i + l * a_layout->leading);
    for (int64_t j = 0; j < n; j++) {
      memset(totals, 0, (size_t)m * sizeof *totals);
      for (int64_t l = 0; l < k; l++)
        add_product(totals, load(type, y, d->transposed[1] ? j + l * b_layout->leading : l + j * b_layout->leading),
                    columns + l * m, m);
      for (int64_t i = 0; i < m; i++) {
        const float total = totals[i];
        const int64_t place = i + j * out_layout->leading;
        float value = *alpha * total;
        if (*beta != 0)
          value += *beta * load(type, old, i + j * c_layout->leading);
        if (bias)
          value += load(type, bias, i);
        store(type, z, place, finished(d, value));
      }
    }
    free(columns);
  }
  put_fault(call, fake_algorithm, type, translate(out, type, 1));
  return SUCCESS;
}

int cublasLtMatmul(exclusive *handle, const desc *d, const float *alpha, const void *a, const layout *a_layout,
                   const void *b, const layout *b_layout, const float *beta, const void *c, const layout *c_layout,
                   void *out, const layout *out_layout, const uint64_t *algo, void *workspace, size_t workspace_bytes,
                   void *stream) {
  MAY_FAIL();
  if (!handle)
    return INVALID_VALUE;
  begin_use(handle);
  const int status = multiply(handle, d, alpha, a, a_layout, b, b_layout, beta, c, c_layout, out, out_layout, algo,
                              workspace, workspace_bytes, stream);
  end_use(handle);
  return status;
}
