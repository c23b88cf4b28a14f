/* Convolutions by cuDNN's backend: a graph of the convolution and what follows it, whose engine the library's
 * heuristics choose.
 *
 * Engines that are compiled already exist, for tensors whose channels do not come last, for a convolution alone and for
 * one with a residual, a bias and ReLU in this order, of which residual and ReLU may be missing; what lies between the
 * operations is float32. Others compile for seconds, or want channels last. Images of the result may be apart where
 * there is no residual. */
#include <stdlib.h>

#include "base/error.h"
#include "driver/driver.h"
#include "vendor/library.h"
#include "vendor/problem.h"

typedef int cudnnStatus_t;
typedef struct cudnnContext *cudnnHandle_t;
typedef void *cudnnBackendDescriptor_t;

enum { CUDNN_DATA_FLOAT = 0, CUDNN_DATA_DOUBLE = 1, CUDNN_DATA_HALF = 2, CUDNN_DATA_BFLOAT16 = 9 };
enum { CUDNN_CROSS_CORRELATION = 1 };
enum { CUDNN_POINTWISE_ADD = 0, CUDNN_POINTWISE_RELU_FWD = 100, CUDNN_PROPAGATE_NAN = 1 };
enum { CUDNN_HEUR_MODE_INSTANT = 0, CUDNN_HEUR_MODE_FALLBACK = 2, CUDNN_HEUR_MODE_A = 3 };
enum {
  CUDNN_NUMERICAL_NOTE_TENSOR_CORE = 0,
  CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS = 1,
  CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION = 2,
  CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC = 4,
  MAX_NOTES = 16
};
enum {
  CUDNN_BACKEND_POINTWISE_DESCRIPTOR = 0,
  CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR = 1,
  CUDNN_BACKEND_ENGINE_DESCRIPTOR = 2,
  CUDNN_BACKEND_ENGINECFG_DESCRIPTOR = 3,
  CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR = 4,
  CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR = 5,
  CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR = 10,
  CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR = 13,
  CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR = 15,
  CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR = 16,
  CUDNN_BACKEND_TENSOR_DESCRIPTOR = 17,
  CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR = 38,
};
enum {
  CUDNN_TYPE_DATA_TYPE = 1,
  CUDNN_TYPE_BOOLEAN = 2,
  CUDNN_TYPE_INT64 = 3,
  CUDNN_TYPE_FLOAT = 4,
  CUDNN_TYPE_DOUBLE = 5,
  CUDNN_TYPE_VOID_PTR = 6,
  CUDNN_TYPE_CONVOLUTION_MODE = 7,
  CUDNN_TYPE_HEUR_MODE = 8,
  CUDNN_TYPE_NAN_PROPOGATION = 10,
  CUDNN_TYPE_NUMERICAL_NOTE = 11,
  CUDNN_TYPE_POINTWISE_MODE = 14,
  CUDNN_TYPE_BACKEND_DESCRIPTOR = 15,
  CUDNN_TYPE_INT32 = 23,
};
enum {
  CUDNN_ATTR_POINTWISE_MODE = 0,
  CUDNN_ATTR_POINTWISE_MATH_PREC = 1,
  CUDNN_ATTR_POINTWISE_NAN_PROPAGATION = 2,
  CUDNN_ATTR_CONVOLUTION_COMP_TYPE = 100,
  CUDNN_ATTR_CONVOLUTION_CONV_MODE = 101,
  CUDNN_ATTR_CONVOLUTION_DILATIONS = 102,
  CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES = 103,
  CUDNN_ATTR_CONVOLUTION_POST_PADDINGS = 104,
  CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS = 105,
  CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS = 106,
  CUDNN_ATTR_ENGINEHEUR_MODE = 200,
  CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH = 201,
  CUDNN_ATTR_ENGINEHEUR_RESULTS = 202,
  CUDNN_ATTR_ENGINEHEUR_DEVICEPROP = 204,
  CUDNN_ATTR_ENGINECFG_ENGINE = 300,
  CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG = 401,
  CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE = 402,
  CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP = 407,
  CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA = 700,
  CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA = 701,
  CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC = 702,
  CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W = 703,
  CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X = 704,
  CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y = 705,
  CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR = 750,
  CUDNN_ATTR_OPERATION_POINTWISE_XDESC = 751,
  CUDNN_ATTR_OPERATION_POINTWISE_BDESC = 752,
  CUDNN_ATTR_OPERATION_POINTWISE_YDESC = 753,
  CUDNN_ATTR_OPERATIONGRAPH_OPS = 801,
  CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT = 900,
  CUDNN_ATTR_TENSOR_DATA_TYPE = 901,
  CUDNN_ATTR_TENSOR_DIMENSIONS = 902,
  CUDNN_ATTR_TENSOR_STRIDES = 903,
  CUDNN_ATTR_TENSOR_UNIQUE_ID = 906,
  CUDNN_ATTR_TENSOR_IS_VIRTUAL = 907,
  CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS = 1000,
  CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS = 1001,
  CUDNN_ATTR_VARIANT_PACK_WORKSPACE = 1003,
  CUDNN_ATTR_ENGINE_NUMERICAL_NOTE = 1303,
  CUDNN_ATTR_DEVICEPROP_DEVICE_ID = 2700,
};

static const char *const symbols[] = {
    "cudnnGetVersion",
    "cudnnCreate",
    "cudnnDestroy",
    "cudnnSetStream",
    "cudnnGetErrorString",
    "cudnnBackendCreateDescriptor",
    "cudnnBackendDestroyDescriptor",
    "cudnnBackendFinalize",
    "cudnnBackendSetAttribute",
    "cudnnBackendGetAttribute",
    "cudnnBackendExecute",
};
static struct {
  size_t (*GetVersion)(void);
  cudnnStatus_t (*Create)(cudnnHandle_t *handle);
  cudnnStatus_t (*Destroy)(cudnnHandle_t handle);
  cudnnStatus_t (*SetStream)(cudnnHandle_t handle, CUstream stream);
  const char *(*GetErrorString)(cudnnStatus_t status);
  cudnnStatus_t (*BackendCreateDescriptor)(int type, cudnnBackendDescriptor_t *descriptor);
  cudnnStatus_t (*BackendDestroyDescriptor)(cudnnBackendDescriptor_t descriptor);
  cudnnStatus_t (*BackendFinalize)(cudnnBackendDescriptor_t descriptor);
  cudnnStatus_t (*BackendSetAttribute)(cudnnBackendDescriptor_t descriptor, int attribute, int type, int64_t count,
                                       const void *elements);
  cudnnStatus_t (*BackendGetAttribute)(cudnnBackendDescriptor_t descriptor, int attribute, int type, int64_t requested,
                                       int64_t *count, void *elements);
  cudnnStatus_t (*BackendExecute)(cudnnHandle_t handle, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t pack);
} dnn;
_Static_assert(sizeof dnn == sizeof symbols, "one function per symbol");

enum { IMAGES, CHANNELS, ROWS, GROUPS, OUT_STRIDE, FIRST_DIMENSION, NUM_VALUES };
enum { IN, KERNEL, SPATIAL, STRIDE, DILATION, PRE_PAD, POST_PAD, PER_DIMENSION };
enum { OUT, X, W, MORE, NUM_POINTERS }; /* MORE: bias, residual and workspace, as far as there are any */
/* Tensors are known by numbers: OUT, X, W, then these, and those that the operations give to each other. */
enum { BIAS = MORE, RESIDUAL, FIRST_VIRTUAL };
enum { MAX_SPATIAL = 3, MAX_DIMS = MAX_SPATIAL + 2, MAX_CONFIGS = 16, MAX_OPERATIONS = 4 };
enum { MAX_ALIGNMENT = 16, MIN_TENSOR_CHANNELS = 16 };
/* Bias and residual, what the operations give to each other, and two descriptors for each that follows. */
enum { MAX_EPILOGUE = 2 + 3 * (MAX_OPERATIONS - 1) };

/* Descriptors that live until the plan is destroyed, in the order of their making. */
typedef struct convolution {
  cudnnBackendDescriptor_t plan;
  cudnnBackendDescriptor_t descriptors[9 + MAX_EPILOGUE + 2 * MAX_CONFIGS];
  uint32_t num_descriptors;
  uint64_t workspace_bytes;
} convolution;

/* A step of making descriptors; after the first failure the others do nothing. */
typedef struct builder {
  convolution *conv;
  cudnnStatus_t status;
  const char *failed;
} builder;

static void note(builder *b, cudnnStatus_t status, const char *what) {
  if (!b->status && status) {
    b->status = status;
    b->failed = what;
  }
}

static cudnnBackendDescriptor_t create(builder *b, int type) {
  cudnnBackendDescriptor_t descriptor = NULL;
  if (b->status)
    return NULL;
  note(b, dnn.BackendCreateDescriptor(type, &descriptor), "cudnnBackendCreateDescriptor");
  if (descriptor)
    b->conv->descriptors[b->conv->num_descriptors++] = descriptor;
  return descriptor;
}

static void set(builder *b, cudnnBackendDescriptor_t descriptor, int attribute, int type, int64_t count,
                const void *elements) {
  if (!b->status)
    note(b, dnn.BackendSetAttribute(descriptor, attribute, type, count, elements), "cudnnBackendSetAttribute");
}

static void finalize(builder *b, cudnnBackendDescriptor_t descriptor) {
  if (!b->status)
    note(b, dnn.BackendFinalize(descriptor), "cudnnBackendFinalize");
}

static int fail(ocp_error *error, cudnnStatus_t status, const char *what) {
  return ocp_fail(error, ORT_EP_FAIL, "%s failed: %s", what, dnn.GetErrorString(status));
}

static bool valid(const ocp_problem_spec *spec, const int64_t *v) {
  const uint32_t count = NUM_VALUES + PER_DIMENSION * spec->rank;
  for (uint32_t i = 0; i < count; i++)
    if (v[i] < 0)
      return false;
  return v[GROUPS] > 0 && v[CHANNELS] % v[GROUPS] == 0 && v[ROWS] % v[GROUPS] == 0;
}

/* Plans are for a device, not for a handle, which may be closed before them: cuDNN can do so since 9.8. */
static int check(ocp_error *error) {
  const size_t version = dnn.GetVersion(), least = 90800;
  return version >= least ? ORT_OK
                          : ocp_fail(error, ORT_FAIL, "cuDNN %zu.%zu.%zu is too old (9.8 or newer is needed)",
                                     version / 10000, version / 100 % 100, version % 100);
}

static int open_handle(void **handle, ocp_error *error) {
  const cudnnStatus_t status = dnn.Create((cudnnHandle_t *)handle);
  return status ? fail(error, status, "cudnnCreate") : ORT_OK;
}

static void close_handle(void *handle) { dnn.Destroy(handle); }

static int data_type(uint32_t dtype) {
  switch (dtype) {
  case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16:
    return CUDNN_DATA_HALF;
  case ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16:
    return CUDNN_DATA_BFLOAT16;
  case ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE:
    return CUDNN_DATA_DOUBLE;
  default:
    return CUDNN_DATA_FLOAT;
  }
}

/* The numbers of the tensors that a call has pointers to, in their order; returns how many. */
static uint32_t tensor_numbers(const ocp_problem_spec *spec, int64_t numbers[FIRST_VIRTUAL]) {
  uint32_t count = 0;
  for (int64_t number = OUT; number < FIRST_VIRTUAL; number++)
    if ((number != BIAS || spec->flags & OCP_PROBLEM_BIAS) &&
        (number != RESIDUAL || spec->flags & OCP_PROBLEM_RESIDUAL))
      numbers[count++] = number;
  return count;
}

/* The alignment of each tensor, up to what vector loads want. Engines want a residual to be like the result. */
static uint32_t extend_key(const ocp_problem_spec *spec, void *const *pointers, int64_t *key) {
  int64_t numbers[FIRST_VIRTUAL];
  for (uint32_t i = tensor_numbers(spec, numbers); i-- > 0;) {
    const uint64_t address = (uint64_t)(uintptr_t)pointers[i] | MAX_ALIGNMENT;
    key[numbers[i]] = (int64_t)(address & -address);
  }
  if (spec->flags & OCP_PROBLEM_RESIDUAL)
    key[OUT] = key[RESIDUAL] = key[OUT] < key[RESIDUAL] ? key[OUT] : key[RESIDUAL];
  return FIRST_VIRTUAL;
}

/* The strides of a tensor with such dimensions. `step` is OUT_STRIDE's number where its images, or with channels last
 * its places, are apart; else 0. */
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

/* The tensor of a number; see fill_strides. */
static cudnnBackendDescriptor_t make_tensor(builder *b, const ocp_problem_spec *spec, const int64_t *key,
                                            int64_t number, const int64_t *dims, int64_t step) {
  const int64_t rank = spec->rank + 2;
  const bool is_virtual = number >= FIRST_VIRTUAL;
  const int type = is_virtual ? CUDNN_DATA_FLOAT : data_type(spec->dtype);
  const int64_t alignment = is_virtual ? MAX_ALIGNMENT : key[NUM_VALUES + spec->rank * PER_DIMENSION + number];
  int64_t strides[MAX_DIMS];
  fill_strides(spec, dims, step, strides);
  cudnnBackendDescriptor_t tensor = create(b, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  set(b, tensor, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
  set(b, tensor, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, rank, dims);
  set(b, tensor, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, rank, strides);
  set(b, tensor, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &number);
  set(b, tensor, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &alignment);
  if (is_virtual)
    set(b, tensor, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &is_virtual);
  finalize(b, tensor);
  return tensor;
}

static cudnnBackendDescriptor_t make_convolution(builder *b, const ocp_problem_spec *spec, const int64_t *key) {
  const int64_t rank = spec->rank;
  const bool is_double = spec->dtype == ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE;
  const int compute = is_double ? CUDNN_DATA_DOUBLE : CUDNN_DATA_FLOAT, mode = CUDNN_CROSS_CORRELATION;
  int64_t values[PER_DIMENSION][MAX_SPATIAL];
  for (int64_t i = 0; i < rank; i++)
    for (int what = 0; what < PER_DIMENSION; what++)
      values[what][i] = key[FIRST_DIMENSION + i * PER_DIMENSION + what];
  cudnnBackendDescriptor_t conv = create(b, CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
  set(b, conv, CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &compute);
  set(b, conv, CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, 1, &mode);
  set(b, conv, CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, CUDNN_TYPE_INT64, 1, &rank);
  set(b, conv, CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, CUDNN_TYPE_INT64, rank, values[STRIDE]);
  set(b, conv, CUDNN_ATTR_CONVOLUTION_DILATIONS, CUDNN_TYPE_INT64, rank, values[DILATION]);
  set(b, conv, CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, CUDNN_TYPE_INT64, rank, values[PRE_PAD]);
  set(b, conv, CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, CUDNN_TYPE_INT64, rank, values[POST_PAD]);
  finalize(b, conv);
  return conv;
}

/* `out` are the dimensions of the result. */
typedef struct operations {
  const ocp_problem_spec *spec;
  const int64_t *key;
  int64_t out[MAX_DIMS], num_virtual;
  uint32_t count;
  cudnnBackendDescriptor_t all[MAX_OPERATIONS];
} operations;

/* What the next operation writes: the result where it is the last one. */
static cudnnBackendDescriptor_t make_result(builder *b, operations *ops, bool last) {
  const int64_t number = last ? OUT : FIRST_VIRTUAL + ops->num_virtual++;
  const bool apart = last && (ops->out[0] > 1 || ops->spec->flags & OCP_PROBLEM_CHANNELS_LAST);
  return make_tensor(b, ops->spec, ops->key, number, ops->out, apart ? ops->key[OUT_STRIDE] : 0);
}

/* Appends an operation on the elements of x and, where it is not NULL, of `other`; returns what it writes. */
static cudnnBackendDescriptor_t append(builder *b, operations *ops, int mode, cudnnBackendDescriptor_t x,
                                       cudnnBackendDescriptor_t other, bool last) {
  const int precision = CUDNN_DATA_FLOAT, nan = CUDNN_PROPAGATE_NAN, descriptor = CUDNN_TYPE_BACKEND_DESCRIPTOR;
  cudnnBackendDescriptor_t result = make_result(b, ops, last);
  cudnnBackendDescriptor_t pointwise = create(b, CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
  set(b, pointwise, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode);
  set(b, pointwise, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, &precision);
  if (mode == CUDNN_POINTWISE_RELU_FWD)
    set(b, pointwise, CUDNN_ATTR_POINTWISE_NAN_PROPAGATION, CUDNN_TYPE_NAN_PROPOGATION, 1, &nan);
  finalize(b, pointwise);
  cudnnBackendDescriptor_t operation = create(b, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
  set(b, operation, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, descriptor, 1, &pointwise);
  set(b, operation, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, descriptor, 1, &x);
  if (other)
    set(b, operation, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, descriptor, 1, &other);
  set(b, operation, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, descriptor, 1, &result);
  finalize(b, operation);
  ops->all[ops->count++] = operation;
  return result;
}

/* Appends the convolution itself; returns what it writes. */
static cudnnBackendDescriptor_t convolve(builder *b, operations *ops, bool last) {
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
  cudnnBackendDescriptor_t operation = create(b, CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR);
  const bool is_double = spec->dtype == ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE;
  const double double_factors[] = {1, 0};
  const float float_factors[] = {1, 0};
  const int factor = is_double ? CUDNN_TYPE_DOUBLE : CUDNN_TYPE_FLOAT;
  const void *alpha = is_double ? (const void *)&double_factors[0] : &float_factors[0];
  const void *beta = is_double ? (const void *)&double_factors[1] : &float_factors[1];
  const int descriptor = CUDNN_TYPE_BACKEND_DESCRIPTOR;
  set(b, operation, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X, descriptor, 1, &tensors[X]);
  set(b, operation, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W, descriptor, 1, &tensors[W]);
  set(b, operation, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y, descriptor, 1, &tensors[OUT]);
  set(b, operation, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC, descriptor, 1, &conv);
  set(b, operation, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA, factor, 1, alpha);
  set(b, operation, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA, factor, 1, beta);
  finalize(b, operation);
  ops->all[ops->count++] = operation;
  return tensors[OUT];
}

static cudnnBackendDescriptor_t make_graph(builder *b, const ocp_problem_spec *spec, const int64_t *key) {
  const bool bias = spec->flags & OCP_PROBLEM_BIAS, relu = spec->flags & OCP_PROBLEM_RELU;
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
    value = append(b, &ops, CUDNN_POINTWISE_ADD, value, make_tensor(b, spec, key, BIAS, channels, 0), !relu);
  if (relu)
    append(b, &ops, CUDNN_POINTWISE_RELU_FWD, value, NULL, true);
  cudnnBackendDescriptor_t graph = create(b, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  set(b, graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, ops.count, ops.all);
  finalize(b, graph);
  return graph;
}

/* The device that plans are for. */
static cudnnBackendDescriptor_t make_device(builder *b, int32_t ordinal) {
  cudnnBackendDescriptor_t device = create(b, CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
  set(b, device, CUDNN_ATTR_DEVICEPROP_DEVICE_ID, CUDNN_TYPE_INT32, 1, &ordinal);
  finalize(b, device);
  return device;
}

/* Whether tensor cores are wanted first, whatever the heuristics say: for channels enough to fill their tiles. */
static bool wants_tensor_cores(const ocp_problem_spec *spec, const int64_t *key) {
  const bool may = spec->dtype != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT || spec->flags & OCP_PROBLEM_TF32;
  return may && spec->flags & OCP_PROBLEM_CHANNELS_LAST && key[CHANNELS] / key[GROUPS] >= MIN_TENSOR_CHANNELS &&
         key[ROWS] / key[GROUPS] >= MIN_TENSOR_CHANNELS;
}

/* Whether the engine of a configuration computes as the problem's flags want it; whether it has tensor cores. */
static bool engine_allowed(const ocp_problem_spec *spec, cudnnBackendDescriptor_t config, bool *tensor_cores) {
  cudnnBackendDescriptor_t engine = NULL;
  int64_t count = 0;
  int notes[MAX_NOTES] = {0};
  if (dnn.BackendCreateDescriptor(CUDNN_BACKEND_ENGINE_DESCRIPTOR, &engine))
    return false;
  bool allowed = !dnn.BackendGetAttribute(config, CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &count,
                                          &engine) &&
                 !dnn.BackendGetAttribute(engine, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE,
                                          MAX_NOTES, &count, notes);
  const bool exact = spec->dtype == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT && !(spec->flags & OCP_PROBLEM_TF32);
  *tensor_cores = false;
  for (int64_t i = 0; allowed && i < count && i < MAX_NOTES; i++) {
    *tensor_cores |= notes[i] == CUDNN_NUMERICAL_NOTE_TENSOR_CORE;
    const bool inexact = notes[i] == CUDNN_NUMERICAL_NOTE_TENSOR_CORE && exact;
    const bool changing = notes[i] == CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC && spec->flags & OCP_PROBLEM_DETERMINISTIC;
    allowed = !inexact && !changing && notes[i] != CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS &&
              notes[i] != CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION;
  }
  dnn.BackendDestroyDescriptor(engine);
  return allowed;
}

/* The plan of one configuration, or NULL where the engine or its workspace does not fit. */
static cudnnBackendDescriptor_t try_config(cudnnBackendDescriptor_t device, cudnnBackendDescriptor_t config,
                                           uint64_t most) {
  cudnnBackendDescriptor_t plan = NULL;
  int64_t count = 0, workspace = 0;
  if (dnn.BackendCreateDescriptor(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, &plan))
    return NULL;
  if (!dnn.BackendSetAttribute(plan, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &device) &&
      !dnn.BackendSetAttribute(plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1,
                               &config) &&
      !dnn.BackendFinalize(plan) &&
      !dnn.BackendGetAttribute(plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &count,
                               &workspace) &&
      workspace >= 0 && (uint64_t)workspace <= most)
    return plan;
  dnn.BackendDestroyDescriptor(plan);
  return NULL;
}

static uint64_t workspace_of(const ocp_problem_spec *spec, const int64_t *key) {
  return (uint64_t)key[FIRST_DIMENSION + (int64_t)spec->rank * PER_DIMENSION];
}

/* The best plan of one heuristic mode after *rank others, which it counts down, or NULL. */
static cudnnBackendDescriptor_t search(builder *b, const ocp_problem_spec *spec, cudnnBackendDescriptor_t device,
                                       cudnnBackendDescriptor_t graph, int mode, const int64_t *key, uint32_t *rank) {
  const uint64_t workspace = workspace_of(spec, key);
  const bool in_two_rounds = wants_tensor_cores(spec, key);
  cudnnBackendDescriptor_t heuristic = create(b, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR), configs[MAX_CONFIGS],
                           plan = NULL;
  set(b, heuristic, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &graph);
  set(b, heuristic, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
  set(b, heuristic, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &device);
  finalize(b, heuristic);
  for (int i = 0; i < MAX_CONFIGS; i++)
    configs[i] = create(b, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
  int64_t found = 0;
  if (!b->status)
    note(b,
         dnn.BackendGetAttribute(heuristic, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, MAX_CONFIGS,
                                 &found, configs),
         "cudnnBackendGetAttribute");
  found = b->status ? 0 : found < MAX_CONFIGS ? found : MAX_CONFIGS;
  for (int64_t i = 0; !plan && i < (in_two_rounds ? 2 * found : found); i++) {
    bool tensor_cores = false;
    if (engine_allowed(spec, configs[i % found], &tensor_cores) && (!in_two_rounds || tensor_cores == (i < found)))
      plan = try_config(device, configs[i % found], workspace);
    if (plan && *rank > 0) {
      (*rank)--;
      dnn.BackendDestroyDescriptor(plan);
      plan = NULL;
    }
  }
  return plan;
}

static void release(void *algorithm) {
  convolution *conv = algorithm;
  if (!conv)
    return;
  if (conv->plan)
    dnn.BackendDestroyDescriptor(conv->plan);
  while (conv->num_descriptors)
    dnn.BackendDestroyDescriptor(conv->descriptors[--conv->num_descriptors]);
  free(conv);
}

static int prepare(const ocp_problem_spec *spec, const ocp_library_handle *handle, const int64_t *key, uint32_t rank,
                   void **algorithm, ocp_error *error) {
  const bool may_be_missing = rank > 0;
  if (key[IMAGES] == 0)
    return ORT_OK; /* nothing to compute: no plan */
  convolution *conv = calloc(1, sizeof *conv);
  if (!conv)
    return ocp_fail(error, ORT_FAIL, "not enough host memory");
  builder b = {.conv = conv};
  cudnnBackendDescriptor_t device = make_device(&b, handle->ordinal), graph = make_graph(&b, spec, key);
  const int modes[] = {spec->flags & OCP_PROBLEM_BRIEF ? CUDNN_HEUR_MODE_INSTANT : CUDNN_HEUR_MODE_A,
                       CUDNN_HEUR_MODE_FALLBACK};
  for (int i = 0; i < 2 && !b.status && !conv->plan; i++)
    conv->plan = search(&b, spec, device, graph, modes[i], key, &rank);
  if (conv->plan) {
    *algorithm = conv;
    return ORT_OK;
  }
  release(conv);
  if (!b.status && may_be_missing)
    return ORT_OK;
  return b.status ? fail(error, b.status, b.failed)
                  : ocp_fail(error, ORT_EP_FAIL, "cuDNN has no engine for a convolution in the precision asked for");
}

static int run(const ocp_problem_spec *spec, void *handle, const ocp_prepared *prepared, CUstream stream,
               void *const *pointers, ocp_error *error) {
  const convolution *conv = prepared->algorithm;
  if (!conv)
    return ORT_OK;
  int64_t numbers[FIRST_VIRTUAL];
  const uint32_t count = tensor_numbers(spec, numbers);
  cudnnBackendDescriptor_t pack = NULL;
  builder b = {0};
  note(&b, dnn.SetStream(handle, stream), "cudnnSetStream");
  if (!b.status)
    note(&b, dnn.BackendCreateDescriptor(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &pack), "cudnnBackendCreateDescriptor");
  set(&b, pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, count, numbers);
  set(&b, pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, count, pointers);
  set(&b, pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &pointers[count]);
  finalize(&b, pack);
  if (!b.status)
    note(&b, dnn.BackendExecute(handle, conv->plan, pack), "cudnnBackendExecute");
  if (pack)
    dnn.BackendDestroyDescriptor(pack);
  return b.status ? fail(error, b.status, b.failed) : ORT_OK;
}

const ocp_library ocp_cudnn = {
    .name = "cuDNN",
    .symbols = symbols,
    .functions = (void **)&dnn,
    .num_symbols = sizeof symbols / sizeof *symbols,
    .num_pointers = NUM_POINTERS,
    .num_values = NUM_VALUES,
    .values_per_dimension = PER_DIMENSION,
    .one_thread = true,
    .check = check,
    .valid = valid,
    .open = open_handle,
    .close = close_handle,
    .extend_key = extend_key,
    .prepare = prepare,
    .release = release,
    .run = run,
};
