/* Common part of cuDNN problems: the library's functions, building of descriptors, and the search for an execution
 * plan. */
#ifndef OCP_VENDOR_CUDNN_H
#define OCP_VENDOR_CUDNN_H

#include "base/error.h"
#include "driver/driver.h"
#include "vendor/library.h"

typedef int cudnnStatus_t;
typedef struct cudnnContext *cudnnHandle_t;
typedef void *cudnnBackendDescriptor_t;

enum {
  CUDNN_STATUS_NOT_INITIALIZED = 1001,
  CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED = 4003,
  CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED = 4004,
};
enum { CUDNN_DATA_FLOAT = 0, CUDNN_DATA_DOUBLE = 1, CUDNN_DATA_HALF = 2, CUDNN_DATA_BFLOAT16 = 9 };
enum { CUDNN_CROSS_CORRELATION = 1 };
enum {
  CUDNN_POINTWISE_ADD = 0,
  CUDNN_POINTWISE_MUL = 1,
  CUDNN_POINTWISE_DIV = 6,
  CUDNN_POINTWISE_SUB = 9,
  CUDNN_POINTWISE_EXP = 13,
  CUDNN_POINTWISE_LOG = 15,
  CUDNN_POINTWISE_RELU_FWD = 100,
  CUDNN_POINTWISE_SWISH_FWD = 106,
  CUDNN_PROPAGATE_NAN = 1
};
enum { CUDNN_HEUR_MODE_INSTANT = 0, CUDNN_HEUR_MODE_FALLBACK = 2, CUDNN_HEUR_MODE_A = 3 };
enum {
  CUDNN_NUMERICAL_NOTE_TENSOR_CORE = 0,
  CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS = 1,
  CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION = 2,
  CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC = 4,
  CUDNN_BEHAVIOR_NOTE_RUNTIME_COMPILATION = 0,
  MAX_NOTES = 16
};
enum { CUDNN_REDUCE_TENSOR_ADD = 0, CUDNN_REDUCE_TENSOR_MAX = 3 };
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
  CUDNN_BACKEND_MATMUL_DESCRIPTOR = 18,
  CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR = 19,
  CUDNN_BACKEND_REDUCTION_DESCRIPTOR = 21,
  CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR = 22,
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
  CUDNN_TYPE_REDUCTION_OPERATOR_TYPE = 18,
  CUDNN_TYPE_BEHAVIOR_NOTE = 19,
  CUDNN_TYPE_INT32 = 23,
  CUDNN_TYPE_CHAR = 24,
};
enum {
  CUDNN_ATTR_POINTWISE_MODE = 0,
  CUDNN_ATTR_POINTWISE_MATH_PREC = 1,
  CUDNN_ATTR_POINTWISE_NAN_PROPAGATION = 2,
  CUDNN_ATTR_POINTWISE_RELU_UPPER_CLIP = 4,
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
  CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION = 405,
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
  CUDNN_ATTR_TENSOR_IS_BY_VALUE = 908,
  CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS = 1000,
  CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS = 1001,
  CUDNN_ATTR_VARIANT_PACK_WORKSPACE = 1003,
  CUDNN_ATTR_ENGINE_NUMERICAL_NOTE = 1303,
  CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE = 1305,
  CUDNN_ATTR_MATMUL_COMP_TYPE = 1500,
  CUDNN_ATTR_OPERATION_MATMUL_ADESC = 1520,
  CUDNN_ATTR_OPERATION_MATMUL_BDESC = 1521,
  CUDNN_ATTR_OPERATION_MATMUL_CDESC = 1522,
  CUDNN_ATTR_OPERATION_MATMUL_DESC = 1523,
  CUDNN_ATTR_REDUCTION_OPERATOR = 1600,
  CUDNN_ATTR_REDUCTION_COMP_TYPE = 1601,
  CUDNN_ATTR_OPERATION_REDUCTION_XDESC = 1610,
  CUDNN_ATTR_OPERATION_REDUCTION_YDESC = 1611,
  CUDNN_ATTR_OPERATION_REDUCTION_DESC = 1612,
  CUDNN_ATTR_DEVICEPROP_DEVICE_ID = 2700,
  CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION = 2702,
};

typedef struct ocp_dnn_functions {
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
} ocp_dnn_functions;
extern ocp_dnn_functions ocp_dnn;
enum { NUM_DNN_SYMBOLS = sizeof(ocp_dnn_functions) / sizeof(void *) };
extern const char *const ocp_dnn_symbols[NUM_DNN_SYMBOLS];

enum { MAX_CONFIGS = 16, MAX_ALIGNMENT = 16 };
/* Maximum number of descriptors: 64 for an operation graph, and those of two heuristic modes with their engine
 * configurations. */
enum { MAX_DESCRIPTORS = 64 + 2 * (1 + MAX_CONFIGS) };

/* An execution plan, and its other descriptors in the order in which they were made. All live as long as the plan. */
typedef struct ocp_dnn_plan {
  cudnnBackendDescriptor_t plan;
  cudnnBackendDescriptor_t descriptors[MAX_DESCRIPTORS];
  uint32_t num_descriptors;
} ocp_dnn_plan;

/* State of building descriptors; after the first failure the later steps do nothing. */
typedef struct ocp_dnn_builder {
  ocp_dnn_plan *conv;
  cudnnStatus_t status;
  const char *failed;
} ocp_dnn_builder;

/* The properties of a tensor descriptor. */
typedef struct ocp_dnn_tensor {
  int type;
  int64_t number, rank, alignment;
  const int64_t *dims, *strides;
  bool is_virtual, is_by_value;
} ocp_dnn_tensor;

void ocp_dnn_note(ocp_dnn_builder *b, cudnnStatus_t status, const char *what);
cudnnBackendDescriptor_t ocp_dnn_create(ocp_dnn_builder *b, int type);
void ocp_dnn_set(ocp_dnn_builder *b, cudnnBackendDescriptor_t descriptor, int attribute, int type, int64_t count,
                 const void *elements);
void ocp_dnn_finalize(ocp_dnn_builder *b, cudnnBackendDescriptor_t descriptor);
cudnnBackendDescriptor_t ocp_dnn_make_tensor(ocp_dnn_builder *b, const ocp_dnn_tensor *tensor);
/* Makes a pointwise operation that reads x and, if it is not NULL, `other`, and writes `result`. `most`: the upper
 * limit of a ReLU; 0: no limit. */
cudnnBackendDescriptor_t ocp_dnn_make_pointwise(ocp_dnn_builder *b, int mode, double most, cudnnBackendDescriptor_t x,
                                                cudnnBackendDescriptor_t other, cudnnBackendDescriptor_t result);
cudnnBackendDescriptor_t ocp_dnn_make_graph(ocp_dnn_builder *b, const cudnnBackendDescriptor_t *operations,
                                            uint32_t count);
int ocp_dnn_data_type(uint32_t dtype);
/* Returns the alignment of an address in bytes, up to the width of vector loads. */
int64_t ocp_dnn_alignment(const void *address);

/* Finds execution plan number `rank` (0: the best) of the graph, among the plans that the spec allows. With
 * `tensor_cores`, plans of precompiled tensor-core engines come first, whatever the heuristics say; if cuDNN has no
 * precompiled engine for the activation, also those of tensor-core engines that it compiles at run time. *algorithm
 * stays NULL if there are fewer plans; for rank 0 that is an error. Takes ownership of b->conv. */
int ocp_dnn_find(ocp_dnn_builder *b, const ocp_problem_spec *spec, const ocp_library_handle *handle,
                 cudnnBackendDescriptor_t graph, uint64_t workspace, bool tensor_cores, uint32_t rank, void **algorithm,
                 ocp_error *error);
/* Implement identify, save and load of ocp_library. `workspace`: bytes that the loaded plan may use. */
bool ocp_dnn_identify(const ocp_library_handle *handle, char *text, uint64_t bytes);
char *ocp_dnn_save(const void *algorithm, uint64_t *bytes);
void *ocp_dnn_load(const ocp_library_handle *handle, const char *data, uint64_t bytes, uint64_t workspace);
int ocp_dnn_execute(void *handle, const void *algorithm, CUstream stream, uint32_t count, const int64_t *numbers,
                    void *const *pointers, void *const *workspace, ocp_error *error);
void ocp_dnn_release(void *algorithm);
size_t ocp_dnn_version(void);
int ocp_dnn_check(ocp_error *error);
int ocp_dnn_open(void **handle, ocp_error *error);
void ocp_dnn_close(void *handle);

#endif
