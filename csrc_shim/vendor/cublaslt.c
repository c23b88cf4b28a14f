/* Matrix products by cuBLASLt.
 *
 * cuBLASLt's matrices are column-major. A row-major matrix product out = a @ b is the column-major matrix product
 * out' = b' @ a' of the same memory. So b is the library's first operand and a its second, and bias[n] applies to the
 * rows of out'. */
#include "vendor/cublaslt.h"

#include <stdlib.h>

#include "base/dtype.h"
#include "base/error.h"
#include "driver/driver.h"
#include "driver/error.h"

typedef int cublasStatus_t;
typedef struct cublasLtContext *cublasLtHandle_t;
typedef struct cublasLtMatmulDesc *cublasLtMatmulDesc_t;
typedef struct cublasLtMatrixLayout *cublasLtMatrixLayout_t;
typedef struct cublasLtMatmulPreference *cublasLtMatmulPreference_t;
typedef struct {
  uint64_t data[8];
} cublasLtMatmulAlgo_t;
typedef struct {
  cublasLtMatmulAlgo_t algo;
  size_t workspaceSize;
  cublasStatus_t state;
  float wavesCount;
  int reserved[4];
} cublasLtMatmulHeuristicResult_t;

enum { CUDA_R_32F = 0, CUDA_R_64F = 1, CUDA_R_16F = 2, CUDA_R_16BF = 14 };
enum { CUBLAS_COMPUTE_32F = 68, CUBLAS_COMPUTE_64F = 70, CUBLAS_COMPUTE_32F_FAST_TF32 = 77 };
enum { CUBLAS_STATUS_NOT_INITIALIZED = 1, CUBLAS_STATUS_ALLOC_FAILED = 3 };
enum { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 };
/* Bits of an epilogue: the activation and the bias. */
enum { CUBLASLT_EPILOGUE_RELU = 2, CUBLASLT_EPILOGUE_BIAS = 4, CUBLASLT_EPILOGUE_GELU = 32 };
enum { CUBLASLT_REDUCTION_SCHEME_INPLACE = 1, CUBLASLT_REDUCTION_SCHEME_MASK = 7 };
enum {
  CUBLASLT_MATMUL_DESC_TRANSA = 3,
  CUBLASLT_MATMUL_DESC_TRANSB = 4,
  CUBLASLT_MATMUL_DESC_EPILOGUE = 7,
  CUBLASLT_MATMUL_DESC_BIAS_POINTER = 8,
};
enum { CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT = 5, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET = 6 };
enum {
  CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1,
  CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK = 3,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5, /* the next attributes are the alignments of B, C and D */
};

static const char *const symbols[] = {
    "cublasLtCreate",
    "cublasLtDestroy",
    "cublasLtGetVersion",
    "cublasLtGetStatusString",
    "cublasLtMatmulDescCreate",
    "cublasLtMatmulDescDestroy",
    "cublasLtMatmulDescSetAttribute",
    "cublasLtMatrixLayoutCreate",
    "cublasLtMatrixLayoutDestroy",
    "cublasLtMatrixLayoutSetAttribute",
    "cublasLtMatmulPreferenceCreate",
    "cublasLtMatmulPreferenceDestroy",
    "cublasLtMatmulPreferenceSetAttribute",
    "cublasLtMatmulAlgoGetHeuristic",
    "cublasLtMatmul",
};
static struct {
  cublasStatus_t (*Create)(cublasLtHandle_t *handle);
  cublasStatus_t (*Destroy)(cublasLtHandle_t handle);
  size_t (*GetVersion)(void);
  const char *(*GetStatusString)(cublasStatus_t status);
  cublasStatus_t (*MatmulDescCreate)(cublasLtMatmulDesc_t *desc, int compute_type, int scale_type);
  cublasStatus_t (*MatmulDescDestroy)(cublasLtMatmulDesc_t desc);
  cublasStatus_t (*MatmulDescSetAttribute)(cublasLtMatmulDesc_t desc, int attribute, const void *value, size_t bytes);
  cublasStatus_t (*MatrixLayoutCreate)(cublasLtMatrixLayout_t *layout, int type, uint64_t rows, uint64_t columns,
                                       int64_t leading_dimension);
  cublasStatus_t (*MatrixLayoutDestroy)(cublasLtMatrixLayout_t layout);
  cublasStatus_t (*MatrixLayoutSetAttribute)(cublasLtMatrixLayout_t layout, int attribute, const void *value,
                                             size_t bytes);
  cublasStatus_t (*MatmulPreferenceCreate)(cublasLtMatmulPreference_t *preference);
  cublasStatus_t (*MatmulPreferenceDestroy)(cublasLtMatmulPreference_t preference);
  cublasStatus_t (*MatmulPreferenceSetAttribute)(cublasLtMatmulPreference_t preference, int attribute,
                                                 const void *value, size_t bytes);
  cublasStatus_t (*MatmulAlgoGetHeuristic)(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                                           cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                           cublasLtMatmulPreference_t preference, int requested,
                                           cublasLtMatmulHeuristicResult_t *results, int *found);
  cublasStatus_t (*Matmul)(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha, const void *a,
                           cublasLtMatrixLayout_t a_layout, const void *b, cublasLtMatrixLayout_t b_layout,
                           const void *beta, const void *c, cublasLtMatrixLayout_t c_layout, void *d,
                           cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t *algo, void *workspace,
                           size_t workspace_bytes, CUstream stream);
} lt;
_Static_assert(sizeof lt == sizeof symbols, "one function per symbol");

enum { M, N, K, A_LEADING, B_LEADING, OUT_LEADING, BATCHES, A_BATCH, B_BATCH, OUT_BATCH, WORKSPACE_BYTES, NUM_VALUES };
enum { OUT, A, B, MORE, NUM_POINTERS }; /* MORE: the bias and the residual, if there are any, then the workspace */
/* Words of the key after the values. */
enum { B_ALIGNMENT = NUM_VALUES, A_ALIGNMENT, C_ALIGNMENT, OUT_ALIGNMENT, BIAS_ALIGNMENT, KEY_END };
enum {
  MAX_ALIGNMENT = 256,     /* bytes; the alignment of the workspace */
  MIN_BIAS_ALIGNMENT = 16, /* bytes; width of the vector loads with which kernels read the bias */
  COPIED = 1,              /* BIAS_ALIGNMENT of a bias that is less aligned, and is copied into the workspace */
};

typedef struct matmul {
  cublasLtMatmulDesc_t desc;
  cublasLtMatrixLayout_t first, second, out, residual; /* layouts of b, a and out; residual may be NULL */
  cublasLtMatmulAlgo_t algo;
} matmul;

static int fail(ocp_error *error, cublasStatus_t status, const char *what) {
  const bool passes = status == CUBLAS_STATUS_NOT_INITIALIZED || status == CUBLAS_STATUS_ALLOC_FAILED;
  return ocp_fail(error, passes ? ORT_FAIL : ORT_RUNTIME_EXCEPTION, "%s failed: %s", what, lt.GetStatusString(status));
}

static bool valid(const ocp_problem_spec *spec, const int64_t *v) {
  (void)spec;
  return v[M] >= 0 && v[N] >= 0 && v[K] > 0 && v[A_LEADING] >= 0 && v[B_LEADING] >= 0 && v[OUT_LEADING] >= 0 &&
         v[BATCHES] >= 0 && v[BATCHES] <= INT32_MAX && v[WORKSPACE_BYTES] >= 0;
}

static int open_handle(void **handle, ocp_error *error) {
  const cublasStatus_t status = lt.Create((cublasLtHandle_t *)handle);
  return status ? fail(error, status, "cublasLtCreate") : ORT_OK;
}

static void close_handle(void *handle) { lt.Destroy(handle); }

static uint32_t data_type(uint32_t dtype) {
  switch (dtype) {
  case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16:
    return CUDA_R_16F;
  case ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16:
    return CUDA_R_16BF;
  case ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE:
    return CUDA_R_64F;
  default:
    return CUDA_R_32F;
  }
}

static int64_t alignment(const void *pointer) {
  const uint64_t address = (uint64_t)(uintptr_t)pointer | MAX_ALIGNMENT;
  return (int64_t)(address & -address);
}

/* Returns the library's operand C: the residual, or without one the result, whose factor beta is 0. */
static void *addend(const ocp_problem_spec *spec, void *const *pointers) {
  return pointers[spec->flags & OCP_PROBLEM_RESIDUAL ? MORE + !!(spec->flags & OCP_PROBLEM_BIAS) : OUT];
}

static uint32_t extend_key(const ocp_problem_spec *spec, void *const *pointers, int64_t *key) {
  key[0] = alignment(pointers[B]);
  key[1] = alignment(pointers[A]);
  key[2] = alignment(addend(spec, pointers));
  key[3] = alignment(pointers[OUT]);
  key[4] = spec->flags & OCP_PROBLEM_BIAS ? alignment(pointers[MORE]) : 0;
  if (key[4] && key[4] < MIN_BIAS_ALIGNMENT)
    key[4] = COPIED;
  return KEY_END - NUM_VALUES;
}

/* Returns the number of bytes at the start of the workspace that hold the copy of the bias; 0 if the bias is not
 * copied. cuBLASLt's preference has attributes for the alignment of each matrix, but none for that of the bias, so an
 * algorithm may read a bias at any address with vector loads. */
static uint64_t copy_bytes(const ocp_problem_spec *spec, const int64_t *key) {
  const uint64_t bytes = (uint64_t)key[N] * ocp_dtype_bits(spec->dtype) / 8;
  return key[BIAS_ALIGNMENT] == COPIED ? (bytes + MAX_ALIGNMENT - 1) & ~(uint64_t)(MAX_ALIGNMENT - 1) : 0;
}

/* The status of a sequence of calls of cuBLASLt, and the name of the call that failed. */
typedef struct calls {
  cublasStatus_t status;
  const char *failed;
} calls;

/* Records the status of a call; returns whether the sequence continues. */
static bool note(calls *made, cublasStatus_t status, const char *what) {
  *made = (calls){status, status ? what : NULL};
  return !status;
}

static bool set_desc(calls *made, cublasLtMatmulDesc_t desc, int attribute, const void *value, size_t bytes) {
  return note(made, lt.MatmulDescSetAttribute(desc, attribute, value, bytes), "cublasLtMatmulDescSetAttribute");
}

static bool make_desc(calls *made, const ocp_problem_spec *spec, const void *bias, cublasLtMatmulDesc_t *desc) {
  const bool is_double = spec->dtype == ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE;
  const bool tf32 = spec->dtype == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT && spec->flags & OCP_PROBLEM_TF32;
  const int compute = is_double ? CUBLAS_COMPUTE_64F : tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
  const int32_t first = spec->flags & OCP_PROBLEM_B_TRANSPOSED ? CUBLAS_OP_T : CUBLAS_OP_N;
  const int32_t second = spec->flags & OCP_PROBLEM_A_TRANSPOSED ? CUBLAS_OP_T : CUBLAS_OP_N;
  const uint32_t epilogue = (spec->flags & OCP_PROBLEM_RELU ? (uint32_t)CUBLASLT_EPILOGUE_RELU : 0) |
                            (spec->flags & OCP_PROBLEM_GELU ? (uint32_t)CUBLASLT_EPILOGUE_GELU : 0) |
                            (spec->flags & OCP_PROBLEM_BIAS ? (uint32_t)CUBLASLT_EPILOGUE_BIAS : 0);
  return note(made, lt.MatmulDescCreate(desc, compute, is_double ? CUDA_R_64F : CUDA_R_32F),
              "cublasLtMatmulDescCreate") &&
         set_desc(made, *desc, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first) &&
         set_desc(made, *desc, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second) &&
         (!epilogue || set_desc(made, *desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue)) &&
         (!(spec->flags & OCP_PROBLEM_BIAS) ||
          set_desc(made, *desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias));
}

static bool set_layout(calls *made, cublasLtMatrixLayout_t layout, int attribute, const void *value, size_t bytes) {
  return note(made, lt.MatrixLayoutSetAttribute(layout, attribute, value, bytes), "cublasLtMatrixLayoutSetAttribute");
}

static bool make_layout(calls *made, cublasLtMatrixLayout_t *layout, uint32_t dtype, int64_t rows, int64_t columns,
                        int64_t leading, int64_t batches, int64_t batch_stride) {
  const int32_t count = (int32_t)batches;
  /* The stride of a dimension of size 1 is arbitrary, but the library requires one that spans a column. */
  const int64_t spanning = columns <= 1 && leading < rows ? rows : leading;
  return note(made, lt.MatrixLayoutCreate(layout, (int)data_type(dtype), (uint64_t)rows, (uint64_t)columns, spanning),
              "cublasLtMatrixLayoutCreate") &&
         set_layout(made, *layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count) &&
         set_layout(made, *layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &batch_stride, sizeof batch_stride);
}

static bool make_layouts(calls *made, const ocp_problem_spec *spec, const int64_t *v, matmul *call) {
  const bool first = spec->flags & OCP_PROBLEM_B_TRANSPOSED, second = spec->flags & OCP_PROBLEM_A_TRANSPOSED;
  return make_layout(made, &call->first, spec->dtype, first ? v[K] : v[N], first ? v[N] : v[K], v[B_LEADING],
                     v[BATCHES], v[B_BATCH]) &&
         make_layout(made, &call->second, spec->dtype, second ? v[M] : v[K], second ? v[K] : v[M], v[A_LEADING],
                     v[BATCHES], v[A_BATCH]) &&
         make_layout(made, &call->out, spec->dtype, v[N], v[M], v[OUT_LEADING], v[BATCHES], v[OUT_BATCH]) &&
         (!(spec->flags & OCP_PROBLEM_RESIDUAL) ||
          make_layout(made, &call->residual, spec->dtype, v[N], v[M], v[N], v[BATCHES], v[M] * v[N]));
}

static cublasLtMatrixLayout_t addend_layout(const matmul *call) { return call->residual ? call->residual : call->out; }

static bool prefer(calls *made, cublasLtMatmulPreference_t preference, int attribute, const void *value, size_t bytes) {
  return note(made, lt.MatmulPreferenceSetAttribute(preference, attribute, value, bytes),
              "cublasLtMatmulPreferenceSetAttribute");
}

static bool make_preference(calls *made, const ocp_problem_spec *spec, const int64_t *key,
                            cublasLtMatmulPreference_t *preference) {
  const uint64_t workspace = (uint64_t)key[WORKSPACE_BYTES] - copy_bytes(spec, key);
  const uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_MASK & ~CUBLASLT_REDUCTION_SCHEME_INPLACE;
  const uint32_t alignments[] = {(uint32_t)key[B_ALIGNMENT], (uint32_t)key[A_ALIGNMENT], (uint32_t)key[C_ALIGNMENT],
                                 (uint32_t)key[OUT_ALIGNMENT]};
  bool ok = note(made, lt.MatmulPreferenceCreate(preference), "cublasLtMatmulPreferenceCreate") &&
            prefer(made, *preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace);
  if (ok && spec->flags & OCP_PROBLEM_DETERMINISTIC) /* in-place split-K reductions use atomics */
    ok = prefer(made, *preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions, sizeof reductions);
  for (int i = 0; i < 4 && ok; i++)
    ok = prefer(made, *preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES + i, &alignments[i], sizeof *alignments);
  return ok;
}

static void release(void *algorithm) {
  matmul *call = algorithm;
  if (!call)
    return;
  if (call->desc)
    lt.MatmulDescDestroy(call->desc);
  if (call->first)
    lt.MatrixLayoutDestroy(call->first);
  if (call->second)
    lt.MatrixLayoutDestroy(call->second);
  if (call->out)
    lt.MatrixLayoutDestroy(call->out);
  if (call->residual)
    lt.MatrixLayoutDestroy(call->residual);
  free(call);
}

enum { MAX_RANK = 8 };

static int prepare(const ocp_problem_spec *spec, const ocp_library_handle *handle, const int64_t *key, uint32_t rank,
                   void **algorithm, ocp_error *error) {
  if (key[M] == 0 || key[N] == 0 || key[BATCHES] == 0 || rank >= MAX_RANK)
    return ORT_OK; /* no algorithm: nothing to compute, or no algorithm of this rank */
  matmul *call = calloc(1, sizeof *call);
  if (!call)
    return ocp_fail_memory(error);
  if (copy_bytes(spec, key) > (uint64_t)key[WORKSPACE_BYTES]) {
    free(call);
    return ocp_fail(error, ORT_RUNTIME_EXCEPTION,
                    "cuBLASLt: a bias of %lld elements at an address that is not a multiple of %d bytes does not fit "
                    "the workspace of %lld bytes",
                    (long long)key[N], MIN_BIAS_ALIGNMENT, (long long)key[WORKSPACE_BYTES]);
  }
  cublasLtMatmulPreference_t preference = NULL;
  cublasLtMatmulHeuristicResult_t best[MAX_RANK] = {0};
  int found = 0;
  calls made = {0};
  /* The search reads no more of the bias's address than its alignment, so the alignment serves as the address. */
  const int64_t bias = key[BIAS_ALIGNMENT] == COPIED ? MAX_ALIGNMENT : key[BIAS_ALIGNMENT];
  (void)(make_desc(&made, spec, (const void *)(uintptr_t)bias, &call->desc) && make_layouts(&made, spec, key, call) &&
         make_preference(&made, spec, key, &preference) &&
         note(&made,
              lt.MatmulAlgoGetHeuristic(handle->handle, call->desc, call->first, call->second, addend_layout(call),
                                        call->out, preference, (int)rank + 1, best, &found),
              "cublasLtMatmulAlgoGetHeuristic") &&
         note(&made, rank < (uint32_t)found ? best[rank].state : 0, "cublasLtMatmulAlgoGetHeuristic"));
  if (preference)
    lt.MatmulPreferenceDestroy(preference);
  if (made.status || rank >= (uint32_t)found) {
    release(call);
    if (rank > 0 && !made.status)
      return ORT_OK;
    return made.status ? fail(error, made.status, made.failed)
                       : ocp_fail(error, ORT_RUNTIME_EXCEPTION,
                                  "cuBLASLt has no algorithm for a GEMM of m, n, k = %lld, %lld, %lld",
                                  (long long)key[M], (long long)key[N], (long long)key[K]);
  }
  call->algo = best[rank].algo;
  *algorithm = call;
  return ORT_OK;
}

static int run(const ocp_problem_spec *spec, const ocp_library_handle *handle, const ocp_prepared *prepared,
               CUstream stream, void *const *pointers, ocp_error *error) {
  const matmul *call = prepared->algorithm;
  if (!call)
    return ORT_OK;
  const double double_factors[] = {spec->alpha, spec->beta};
  const float float_factors[] = {(float)spec->alpha, (float)spec->beta};
  const bool is_double = spec->dtype == ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE;
  const void *alpha = is_double ? (const void *)&double_factors[0] : &float_factors[0];
  const void *beta = is_double ? (const void *)&double_factors[1] : &float_factors[1];
  const bool bias = spec->flags & OCP_PROBLEM_BIAS, residual = spec->flags & OCP_PROBLEM_RESIDUAL;
  const uint64_t copied = copy_bytes(spec, prepared->key);
  char *workspace = pointers[MORE + bias + residual];
  if (copied) {
    const CUresult result =
        handle->driver->MemcpyDtoDAsync((CUdeviceptr)(uintptr_t)workspace, (CUdeviceptr)(uintptr_t)pointers[MORE],
                                        (uint64_t)prepared->key[N] * ocp_dtype_bits(spec->dtype) / 8, stream);
    if (result != CUDA_SUCCESS)
      return ocp_fail_cuda(error, handle->driver, result, "copying a bias to an aligned address");
  }
  /* A call with a bias makes its own descriptor: a descriptor holds the bias's address, and several threads may call at
   * once. */
  cublasLtMatmulDesc_t desc = call->desc;
  calls made = {0};
  if (!bias || make_desc(&made, spec, copied ? workspace : pointers[MORE], &desc))
    note(&made,
         lt.Matmul(handle->handle, desc, alpha, pointers[B], call->first, pointers[A], call->second, beta,
                   addend(spec, pointers), addend_layout(call), pointers[OUT], call->out, &call->algo,
                   workspace + copied, (size_t)prepared->key[WORKSPACE_BYTES] - copied, stream),
         "cublasLtMatmul");
  if (bias && desc != call->desc)
    lt.MatmulDescDestroy(desc);
  return made.status ? fail(error, made.status, made.failed) : ORT_OK;
}

static ocp_result result(const ocp_problem_spec *spec, const int64_t *key) {
  (void)spec;
  return (ocp_result){.groups = key[BATCHES],
                      .group_stride = key[OUT_BATCH],
                      .rows = key[M],
                      .row_stride = key[OUT_LEADING],
                      .columns = key[N]};
}

static size_t version(void) { return lt.GetVersion(); }

const ocp_library ocp_cublaslt = {
    .name = "cuBLASLt",
    .slot = OCP_SLOT_CUBLASLT,
    .symbols = symbols,
    .functions = (void **)&lt,
    .num_symbols = sizeof symbols / sizeof *symbols,
    .num_pointers = NUM_POINTERS,
    .num_values = NUM_VALUES,
    .version = version,
    .valid = valid,
    .open = open_handle,
    .close = close_handle,
    .extend_key = extend_key,
    .prepare = prepare,
    .release = release,
    .result = result,
    .run = run,
};
