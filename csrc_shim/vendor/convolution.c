/* Convolutions by cuDNN: an operation graph of the convolution and its epilogue, whose engine the library's
 * heuristics choose.
 *
 * cuDNN has precompiled engines for a convolution alone, and for a convolution followed by an optional residual, a bias
 * and an optional ReLU, in this order; intermediate values are float32. Other engines take seconds to compile. Without
 * a residual, the result may have a stride between images, or in NHWC between output pixels. */
#include "vendor/convolution.h"

#include <stdlib.h>

#include "base/error.h"
#include "vendor/cudnn.h"

enum { IMAGES, CHANNELS, ROWS, GROUPS, OUT_STRIDE, FIRST_DIMENSION, NUM_VALUES };
enum { IN, KERNEL, SPATIAL, STRIDE, DILATION, PRE_PAD, POST_PAD, PER_DIMENSION };
enum { OUT, X, W, MORE, NUM_POINTERS }; /* MORE: the bias and the residual, if there are any, then the workspace */
/* Tensor numbers: OUT, X, W, then these, then the virtual tensors between operations. */
enum { BIAS = MORE, RESIDUAL, FIRST_VIRTUAL };
enum { MAX_SPATIAL = 3, MAX_DIMS = MAX_SPATIAL + 2, MAX_OPERATIONS = 4 };
enum { MIN_TENSOR_CHANNELS = 16 };
static bool valid(const ocp_problem_spec *spec, const int64_t *v) {
  const uint32_t count = NUM_VALUES + PER_DIMENSION * spec->rank;
  for (uint32_t i = 0; i < count; i++)
    if (v[i] < 0)
      return false;
  return v[GROUPS] > 0 && v[CHANNELS] % v[GROUPS] == 0 && v[ROWS] % v[GROUPS] == 0;
}

/* Lists the tensor numbers (OUT, X, W, BIAS, RESIDUAL) of a call's pointers, in order; returns their count. */
static uint32_t tensor_numbers(const ocp_problem_spec *spec, int64_t numbers[FIRST_VIRTUAL]) {
  uint32_t count = 0;
  for (int64_t number = OUT; number < FIRST_VIRTUAL; number++)
    if ((number != BIAS || spec->flags & OCP_PROBLEM_BIAS) &&
        (number != RESIDUAL || spec->flags & OCP_PROBLEM_RESIDUAL))
      numbers[count++] = number;
  return count;
}

/* Appends to the key the alignment of each tensor in bytes, up to the width of vector loads. The result and the
 * residual both get the smaller of their alignments, because engines require equal ones. */
static uint32_t extend_key(const ocp_problem_spec *spec, void *const *pointers, int64_t *key) {
  int64_t numbers[FIRST_VIRTUAL];
  for (uint32_t i = tensor_numbers(spec, numbers); i-- > 0;)
    key[numbers[i]] = ocp_dnn_alignment(pointers[i]);

  if (spec->flags & OCP_PROBLEM_RESIDUAL)
    key[OUT] = key[RESIDUAL] = key[OUT] < key[RESIDUAL] ? key[OUT] : key[RESIDUAL];
  return FIRST_VIRTUAL;
}

/* Computes the strides of a tensor with these dimensions. `step`: nonzero is the stride between its images (in NHWC
 * between its output pixels); 0: the tensor is contiguous. */
static void fill_strides(const ocp_problem_spec *spec, const int64_t *dims, int64_t step, int64_t *strides) {
  const int64_t rank = spec->rank + 2;
  if (spec->flags & OCP_PROBLEM_CHANNELS_LAST) {
    strides[1] = 1;
    int64_t stride = step ? step : dims[1];
    for (int64_t i = rank; i-- > 2; stride *= dims[i])
      strides[i] = stride;
    strides[0] = stride;
    return;
  }
  for (int64_t i = rank, stride = 1; i-- > 0; stride *= dims[i])
    strides[i] = stride;
  strides[0] = step ? step : strides[0];
}

/* Describes the tensor with this number. `step`: as in fill_strides. */
static cudnnBackendDescriptor_t make_tensor(ocp_dnn_builder *b, const ocp_problem_spec *spec, const int64_t *key,
                                            int64_t number, const int64_t *dims, int64_t step) {
  const int64_t rank = spec->rank + 2;
  const bool is_virtual = number >= FIRST_VIRTUAL;
  const int type = is_virtual ? CUDNN_DATA_FLOAT : ocp_dnn_data_type(spec->dtype);
  const int64_t alignment = is_virtual ? MAX_ALIGNMENT : key[NUM_VALUES + spec->rank * PER_DIMENSION + number];
  int64_t strides[MAX_DIMS];
  fill_strides(spec, dims, step, strides);
  return ocp_dnn_make_tensor(b, &(ocp_dnn_tensor){.type = type,
                                                  .number = number,
                                                  .rank = rank,
                                                  .alignment = alignment,
                                                  .dims = dims,
                                                  .strides = strides,
                                                  .is_virtual = is_virtual});
}

static cudnnBackendDescriptor_t make_convolution(ocp_dnn_builder *b, const ocp_problem_spec *spec, const int64_t *key) {
  const int64_t rank = spec->rank;
  const bool is_double = spec->dtype == ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE;
  const int compute = is_double ? CUDNN_DATA_DOUBLE : CUDNN_DATA_FLOAT, mode = CUDNN_CROSS_CORRELATION;
  int64_t values[PER_DIMENSION][MAX_SPATIAL];
  for (int64_t i = 0; i < rank; i++)
    for (int what = 0; what < PER_DIMENSION; what++)
      values[what][i] = key[FIRST_DIMENSION + i * PER_DIMENSION + what];
  cudnnBackendDescriptor_t conv = ocp_dnn_create(b, CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
  ocp_dnn_set(b, conv, CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &compute);
  ocp_dnn_set(b, conv, CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, 1, &mode);
  ocp_dnn_set(b, conv, CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, CUDNN_TYPE_INT64, 1, &rank);
  ocp_dnn_set(b, conv, CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, CUDNN_TYPE_INT64, rank, values[STRIDE]);
  ocp_dnn_set(b, conv, CUDNN_ATTR_CONVOLUTION_DILATIONS, CUDNN_TYPE_INT64, rank, values[DILATION]);
  ocp_dnn_set(b, conv, CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, CUDNN_TYPE_INT64, rank, values[PRE_PAD]);
  ocp_dnn_set(b, conv, CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, CUDNN_TYPE_INT64, rank, values[POST_PAD]);
  ocp_dnn_finalize(b, conv);
  return conv;
}

/* The operations of a graph under construction. `out`: the dimensions of the result. */
typedef struct operations {
  const ocp_problem_spec *spec;
  const int64_t *key;
  int64_t out[MAX_DIMS], num_virtual;
  uint32_t count;
  cudnnBackendDescriptor_t all[MAX_OPERATIONS];
} operations;

/* Describes the next operation's output: the result for the last operation, else a virtual tensor. */
static cudnnBackendDescriptor_t make_result(ocp_dnn_builder *b, operations *ops, bool last) {
  const int64_t number = last ? OUT : FIRST_VIRTUAL + ops->num_virtual++;
  const bool apart = last && (ops->out[0] > 1 || ops->spec->flags & OCP_PROBLEM_CHANNELS_LAST);
  return make_tensor(b, ops->spec, ops->key, number, ops->out, apart ? ops->key[OUT_STRIDE] : 0);
}

/* Appends a pointwise operation on x and, if it is not NULL, `other`; returns its output. */
static cudnnBackendDescriptor_t append(ocp_dnn_builder *b, operations *ops, int mode, cudnnBackendDescriptor_t x,
                                       cudnnBackendDescriptor_t other, bool last) {
  cudnnBackendDescriptor_t result = make_result(b, ops, last);
  const bool is_limited = mode == CUDNN_POINTWISE_RELU_FWD && ops->spec->flags & OCP_PROBLEM_RELU6;
  ops->all[ops->count++] = ocp_dnn_make_pointwise(b, mode, is_limited ? 6 : 0, x, other, result);
  return result;
}

/* Appends the convolution itself; returns its output. */
static cudnnBackendDescriptor_t convolve(ocp_dnn_builder *b, operations *ops, bool last) {
  const ocp_problem_spec *spec = ops->spec;
  const int64_t *key = ops->key;
  int64_t x[MAX_DIMS] = {key[IMAGES], key[CHANNELS]}, w[MAX_DIMS] = {key[ROWS], key[CHANNELS] / key[GROUPS]};
  for (uint32_t i = 0; i < spec->rank; i++) {
    const int64_t *dimension = key + FIRST_DIMENSION + i * PER_DIMENSION;
    x[i + 2] = dimension[IN];
    w[i + 2] = dimension[KERNEL];
  }
  cudnnBackendDescriptor_t tensors[] = {make_result(b, ops, last), make_tensor(b, spec, key, X, x, 0),
                                        make_tensor(b, spec, key, W, w, 0)};
  cudnnBackendDescriptor_t conv = make_convolution(b, spec, key);
  cudnnBackendDescriptor_t operation = ocp_dnn_create(b, CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR);
  const bool is_double = spec->dtype == ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE;
  const double double_factors[] = {1, 0};
  const float float_factors[] = {1, 0};
  const int factor = is_double ? CUDNN_TYPE_DOUBLE : CUDNN_TYPE_FLOAT;
  const void *alpha = is_double ? (const void *)&double_factors[0] : &float_factors[0];
  const void *beta = is_double ? (const void *)&double_factors[1] : &float_factors[1];
  const int descriptor = CUDNN_TYPE_BACKEND_DESCRIPTOR;
  ocp_dnn_set(b, operation, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X, descriptor, 1, &tensors[X]);
  ocp_dnn_set(b, operation, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W, descriptor, 1, &tensors[W]);
  ocp_dnn_set(b, operation, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y, descriptor, 1, &tensors[OUT]);
  ocp_dnn_set(b, operation, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC, descriptor, 1, &conv);
  ocp_dnn_set(b, operation, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA, factor, 1, alpha);
  ocp_dnn_set(b, operation, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA, factor, 1, beta);
  ocp_dnn_finalize(b, operation);
  ops->all[ops->count++] = operation;
  return tensors[OUT];
}

static cudnnBackendDescriptor_t make_graph(ocp_dnn_builder *b, const ocp_problem_spec *spec, const int64_t *key) {
  const bool bias = spec->flags & OCP_PROBLEM_BIAS,
             active = spec->flags & (OCP_PROBLEM_RELU | OCP_PROBLEM_SWISH | OCP_PROBLEM_RELU6);
  operations ops = {.spec = spec, .key = key, .out = {key[IMAGES], key[ROWS]}};
  int64_t channels[MAX_DIMS] = {1, key[ROWS]};
  for (uint32_t i = 0; i < spec->rank; i++) {
    ops.out[i + 2] = key[FIRST_DIMENSION + i * PER_DIMENSION + SPATIAL];
    channels[i + 2] = 1;
  }
  cudnnBackendDescriptor_t value = convolve(b, &ops, !bias);
  if (spec->flags & OCP_PROBLEM_RESIDUAL)
    value = append(b, &ops, CUDNN_POINTWISE_ADD, value, make_tensor(b, spec, key, RESIDUAL, ops.out, 0), false);
  if (bias)
    value = append(b, &ops, CUDNN_POINTWISE_ADD, value, make_tensor(b, spec, key, BIAS, channels, 0), !active);
  if (active)
    append(b, &ops, spec->flags & OCP_PROBLEM_SWISH ? CUDNN_POINTWISE_SWISH_FWD : CUDNN_POINTWISE_RELU_FWD, value, NULL,
           true);
  return ocp_dnn_make_graph(b, ops.all, ops.count);
}

/* Whether engines on tensor cores come first, whatever the heuristics say: the flags allow them, the layout is NHWC,
 * and the channels of a group fill a tensor-core tile. */
static bool wants_tensor_cores(const ocp_problem_spec *spec, const int64_t *key) {
  const bool may = spec->dtype != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT || spec->flags & OCP_PROBLEM_TF32;
  return may && spec->flags & OCP_PROBLEM_CHANNELS_LAST && key[CHANNELS] / key[GROUPS] >= MIN_TENSOR_CHANNELS &&
         key[ROWS] / key[GROUPS] >= MIN_TENSOR_CHANNELS;
}

static uint64_t workspace_of(const ocp_problem_spec *spec, const int64_t *key) {
  return (uint64_t)key[FIRST_DIMENSION + (int64_t)spec->rank * PER_DIMENSION];
}

static int prepare(const ocp_problem_spec *spec, const ocp_library_handle *handle, const int64_t *key, uint32_t rank,
                   void **algorithm, ocp_error *error) {
  if (key[IMAGES] == 0)
    return ORT_OK; /* nothing to compute: no execution plan */
  ocp_dnn_builder b = {.conv = calloc(1, sizeof(ocp_dnn_plan))};
  if (!b.conv)
    return ocp_fail_memory(error);
  return ocp_dnn_find(&b, spec, handle, make_graph(&b, spec, key), workspace_of(spec, key),
                      wants_tensor_cores(spec, key), rank, algorithm, error);
}

static void *load(const ocp_problem_spec *spec, const ocp_library_handle *handle, const int64_t *key, const char *data,
                  uint64_t bytes) {
  return ocp_dnn_load(handle, data, bytes, workspace_of(spec, key));
}

static int run(const ocp_problem_spec *spec, const ocp_library_handle *handle, const ocp_prepared *prepared,
               CUstream stream, void *const *pointers, ocp_error *error) {
  if (!prepared->algorithm)
    return ORT_OK;
  int64_t numbers[FIRST_VIRTUAL];
  const uint32_t count = tensor_numbers(spec, numbers);
  return ocp_dnn_execute(handle->handle, prepared->algorithm, stream, count, numbers, pointers, &pointers[count],
                         error);
}

/* Describes the result as rows of contiguous elements: a row is an image, or with CHANNELS_LAST an output pixel. */
static ocp_result result(const ocp_problem_spec *spec, const int64_t *key) {
  int64_t pixels = 1;
  for (int64_t i = 0; i < spec->rank; i++)
    pixels *= key[FIRST_DIMENSION + i * PER_DIMENSION + SPATIAL];
  const bool is_last = spec->flags & OCP_PROBLEM_CHANNELS_LAST;
  const int64_t columns = is_last ? key[ROWS] : key[ROWS] * pixels, step = key[OUT_STRIDE];
  return (ocp_result){.groups = 1,
                      .rows = is_last ? key[IMAGES] * pixels : key[IMAGES],
                      .row_stride = step ? step : columns,
                      .columns = columns};
}

const ocp_library ocp_cudnn = {
    .name = "cuDNN",
    .slot = OCP_SLOT_CUDNN,
    .symbols = ocp_dnn_symbols,
    .functions = (void **)&ocp_dnn,
    .num_symbols = NUM_DNN_SYMBOLS,
    .num_pointers = NUM_POINTERS,
    .num_values = NUM_VALUES,
    .values_per_dimension = PER_DIMENSION,
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
    .result = result,
    .identify = ocp_dnn_identify,
    .save = ocp_dnn_save,
    .load = load,
    .run = run,
};
