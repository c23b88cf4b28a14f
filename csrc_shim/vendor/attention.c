/* Attention by cuDNN: two matrix products with a softmax between them, as the operation graph that cuDNN's engines
 * recognize. That graph also computes the logarithm of the softmax denominators, which nothing reads. cuDNN takes about
 * a second to compile an engine. Intermediate values are float32, except that the softmax results have the type of the
 * operands. */
#include "vendor/attention.h"

#include <stdlib.h>

#include "base/error.h"
#include "vendor/cudnn.h"

enum { BATCHES, HEADS, ROWS, KEYS, DEPTH, WIDTH, STRIDES };
/* Indices of strides in a call's values: strides of batch, head and row of each tensor; of the bias also the key's. */
enum { Q_STRIDES = STRIDES, K_STRIDES = Q_STRIDES + 3, V_STRIDES = K_STRIDES + 3, OUT_STRIDES = V_STRIDES + 3 };
enum { BIAS_STRIDES = OUT_STRIDES + 3, WORKSPACE = BIAS_STRIDES + 4, NUM_VALUES };
enum { OUT, Q, K, V, MORE, NUM_POINTERS }; /* MORE: the bias, if there is one, then the workspace */
enum { BIAS = MORE, SCALE, FIRST_VIRTUAL, MAX_OPERATIONS = 11, RANK = 4 };

static bool valid(const ocp_problem_spec *spec, const int64_t *v) {
  (void)spec;
  for (uint32_t i = 0; i < NUM_VALUES; i++)
    if (v[i] < 0)
      return false;
  return v[KEYS] > 0 && v[DEPTH] > 0 && v[WIDTH] > 0;
}

static uint32_t extend_key(const ocp_problem_spec *spec, void *const *pointers, int64_t *key) {
  const uint32_t count = MORE + !!(spec->flags & OCP_PROBLEM_BIAS);
  for (uint32_t i = 0; i < count; i++)
    key[i] = ocp_dnn_alignment(pointers[i]);
  return BIAS + 1;
}

/* The operation graph under construction. */
typedef struct attention {
  ocp_dnn_builder *b;
  const ocp_problem_spec *spec;
  const int64_t *key;
  int64_t num_virtual;
  uint32_t count;
  cudnnBackendDescriptor_t operations[MAX_OPERATIONS];
} attention;

/* Describes a tensor in memory. The last stride is between columns. */
static cudnnBackendDescriptor_t stored(attention *a, int64_t number, int64_t rows, int64_t columns,
                                       const int64_t strides[RANK]) {
  const int64_t *key = a->key;
  int64_t dims[RANK] = {key[BATCHES], key[HEADS], rows, columns}, dense = 1, own[RANK];
  for (int i = RANK; i-- > 0; dense *= dims[i]) {
    if (number == BIAS && strides[i] == 0)
      dims[i] = 1; /* cuDNN broadcasts this dimension */
    own[i] = strides[i] ? strides[i] : dense;
  }
  return ocp_dnn_make_tensor(a->b, &(ocp_dnn_tensor){.type = ocp_dnn_data_type(a->spec->dtype),
                                                     .number = number,
                                                     .rank = RANK,
                                                     .alignment = key[NUM_VALUES + number],
                                                     .dims = dims,
                                                     .strides = own});
}

/* Describes a virtual tensor between two operations, with rows of `columns`; in the operands' type if `is_half`,
 * else float32. */
static cudnnBackendDescriptor_t between(attention *a, int64_t columns, bool is_half) {
  const int64_t *key = a->key, dims[RANK] = {key[BATCHES], key[HEADS], key[ROWS], columns};
  const int64_t strides[RANK] = {key[HEADS] * key[ROWS] * columns, key[ROWS] * columns, columns, 1};
  return ocp_dnn_make_tensor(a->b,
                             &(ocp_dnn_tensor){.type = is_half ? ocp_dnn_data_type(a->spec->dtype) : CUDNN_DATA_FLOAT,
                                               .number = FIRST_VIRTUAL + a->num_virtual++,
                                               .rank = RANK,
                                               .alignment = MAX_ALIGNMENT,
                                               .dims = dims,
                                               .strides = strides,
                                               .is_virtual = true});
}

static cudnnBackendDescriptor_t multiply(attention *a, cudnnBackendDescriptor_t x, cudnnBackendDescriptor_t y,
                                         cudnnBackendDescriptor_t result) {
  ocp_dnn_builder *b = a->b;
  const int type = CUDNN_DATA_FLOAT, descriptor = CUDNN_TYPE_BACKEND_DESCRIPTOR;
  cudnnBackendDescriptor_t product = ocp_dnn_create(b, CUDNN_BACKEND_MATMUL_DESCRIPTOR);
  ocp_dnn_set(b, product, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
  ocp_dnn_finalize(b, product);
  cudnnBackendDescriptor_t operation = ocp_dnn_create(b, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
  ocp_dnn_set(b, operation, CUDNN_ATTR_OPERATION_MATMUL_DESC, descriptor, 1, &product);
  ocp_dnn_set(b, operation, CUDNN_ATTR_OPERATION_MATMUL_ADESC, descriptor, 1, &x);
  ocp_dnn_set(b, operation, CUDNN_ATTR_OPERATION_MATMUL_BDESC, descriptor, 1, &y);
  ocp_dnn_set(b, operation, CUDNN_ATTR_OPERATION_MATMUL_CDESC, descriptor, 1, &result);
  ocp_dnn_finalize(b, operation);
  a->operations[a->count++] = operation;
  return result;
}

static cudnnBackendDescriptor_t reduce(attention *a, int how, cudnnBackendDescriptor_t x) {
  ocp_dnn_builder *b = a->b;
  const int type = CUDNN_DATA_FLOAT, descriptor = CUDNN_TYPE_BACKEND_DESCRIPTOR;
  cudnnBackendDescriptor_t result = between(a, 1, false);
  cudnnBackendDescriptor_t reduction = ocp_dnn_create(b, CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
  ocp_dnn_set(b, reduction, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
  ocp_dnn_set(b, reduction, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &how);
  ocp_dnn_finalize(b, reduction);
  cudnnBackendDescriptor_t operation = ocp_dnn_create(b, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
  ocp_dnn_set(b, operation, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, descriptor, 1, &x);
  ocp_dnn_set(b, operation, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, descriptor, 1, &result);
  ocp_dnn_set(b, operation, CUDNN_ATTR_OPERATION_REDUCTION_DESC, descriptor, 1, &reduction);
  ocp_dnn_finalize(b, operation);
  a->operations[a->count++] = operation;
  return result;
}

static cudnnBackendDescriptor_t apply(attention *a, int mode, cudnnBackendDescriptor_t x,
                                      cudnnBackendDescriptor_t other, cudnnBackendDescriptor_t result) {
  a->operations[a->count++] = ocp_dnn_make_pointwise(a->b, mode, 0, x, other, result);
  return result;
}

static cudnnBackendDescriptor_t make_graph(attention *a) {
  const int64_t *key = a->key, keys = key[KEYS], ones[RANK] = {1, 1, 1, 1};
  const int64_t *q = key + Q_STRIDES, *k = key + K_STRIDES, *v = key + V_STRIDES, *out = key + OUT_STRIDES;
  cudnnBackendDescriptor_t queries = stored(a, Q, key[ROWS], key[DEPTH], (int64_t[]){q[0], q[1], q[2], 1}),
                           turned = stored(a, K, key[DEPTH], keys, (int64_t[]){k[0], k[1], 1, k[2]}),
                           values = stored(a, V, keys, key[WIDTH], (int64_t[]){v[0], v[1], v[2], 1}),
                           result = stored(a, OUT, key[ROWS], key[WIDTH], (int64_t[]){out[0], out[1], out[2], 1}),
                           scale = ocp_dnn_make_tensor(a->b, &(ocp_dnn_tensor){.type = CUDNN_DATA_FLOAT,
                                                                               .number = SCALE,
                                                                               .rank = RANK,
                                                                               .alignment = sizeof(float),
                                                                               .dims = ones,
                                                                               .strides = ones,
                                                                               .is_by_value = true});
  cudnnBackendDescriptor_t score = multiply(a, queries, turned, between(a, keys, false));
  score = apply(a, CUDNN_POINTWISE_MUL, score, scale, between(a, keys, false));
  if (a->spec->flags & OCP_PROBLEM_BIAS)
    score = apply(a, CUDNN_POINTWISE_ADD, score, stored(a, BIAS, key[ROWS], keys, key + BIAS_STRIDES),
                  between(a, keys, false));
  cudnnBackendDescriptor_t most = reduce(a, CUDNN_REDUCE_TENSOR_MAX, score);
  cudnnBackendDescriptor_t below = apply(a, CUDNN_POINTWISE_SUB, score, most, between(a, keys, false));
  cudnnBackendDescriptor_t power = apply(a, CUDNN_POINTWISE_EXP, below, NULL, between(a, keys, false));
  cudnnBackendDescriptor_t sum = reduce(a, CUDNN_REDUCE_TENSOR_ADD, power);
  cudnnBackendDescriptor_t logarithm = apply(a, CUDNN_POINTWISE_LOG, sum, NULL, between(a, 1, false));
  apply(a, CUDNN_POINTWISE_ADD, most, logarithm, between(a, 1, false));
  cudnnBackendDescriptor_t weight = apply(a, CUDNN_POINTWISE_DIV, power, sum, between(a, keys, true));
  multiply(a, weight, values, result);
  return ocp_dnn_make_graph(a->b, a->operations, a->count);
}

static int prepare(const ocp_problem_spec *spec, const ocp_library_handle *handle, const int64_t *key, uint32_t rank,
                   void **algorithm, ocp_error *error) {
  if (key[BATCHES] * key[HEADS] * key[ROWS] == 0)
    return ORT_OK; /* nothing to compute: no execution plan */
  ocp_dnn_builder b = {.conv = calloc(1, sizeof(ocp_dnn_plan))};
  if (!b.conv)
    return ocp_fail_memory(error);
  attention a = {.b = &b, .spec = spec, .key = key};
  return ocp_dnn_find(&b, spec, handle, make_graph(&a), (uint64_t)key[WORKSPACE], false, rank, algorithm, error);
}

static void *load(const ocp_problem_spec *spec, const ocp_library_handle *handle, const int64_t *key, const char *data,
                  uint64_t bytes) {
  (void)spec;
  return ocp_dnn_load(handle, data, bytes, (uint64_t)key[WORKSPACE]);
}

static int run(const ocp_problem_spec *spec, const ocp_library_handle *handle, const ocp_prepared *prepared,
               CUstream stream, void *const *pointers, ocp_error *error) {
  if (!prepared->algorithm)
    return ORT_OK;
  const bool bias = spec->flags & OCP_PROBLEM_BIAS;
  float scale = (float)spec->alpha;
  const int64_t numbers[] = {OUT, Q, K, V, bias ? BIAS : SCALE, SCALE};
  void *const bound[] = {pointers[OUT], pointers[Q], pointers[K], pointers[V], bias ? pointers[MORE] : &scale, &scale};
  return ocp_dnn_execute(handle->handle, prepared->algorithm, stream, bias ? 6 : 5, numbers, bound,
                         &pointers[MORE + bias], error);
}

const ocp_library ocp_cudnn_attention = {
    .name = "cuDNN",
    .slot = OCP_SLOT_CUDNN,
    .symbols = ocp_dnn_symbols,
    .functions = (void **)&ocp_dnn,
    .num_symbols = NUM_DNN_SYMBOLS,
    .num_pointers = NUM_POINTERS,
    .num_values = NUM_VALUES,
    .is_for_device = true,
    .one_thread = true,
    .version = ocp_dnn_version,
    .check = ocp_dnn_check,
    .valid = valid,
    .open = ocp_dnn_open,
    .close = ocp_dnn_close,
    .extend_key = extend_key,
    .prepare = prepare,
    .release = ocp_dnn_release,
    .identify = ocp_dnn_identify,
    .save = ocp_dnn_save,
    .load = load,
    .run = run,
};
