/* A host without ONNX Runtime: implements the functions of OrtApi and OrtEpApi that the library calls while a session
 * runs, on plain structs. All other slots are NULL, so that an unexpected call crashes. */
#ifndef OCP_TESTS_MOCK_ORT_H
#define OCP_TESTS_MOCK_ORT_H

#include <stdatomic.h>

#include "base/ort_abi.h"

struct OrtMemoryDevice {
  OrtMemoryInfoDeviceType type;
  uint32_t vendor, id;
  OrtDeviceMemoryType memory;
};

struct OrtMemoryInfo {
  OrtMemoryDevice device;
  OrtAllocatorType type;
  char name[32];
};

struct OrtStatus {
  OrtErrorCode code;
  char text[1024];
};

struct OrtSyncStream {
  OrtSyncStreamImpl *impl; /* NULL: a stream of ORT itself, without a handle */
};

enum { MOCK_MAX_RANK = 8, MOCK_MAX_VALUES = 64, MOCK_MAX_PAIRS = 16, MOCK_MAX_KERNELS = 64, MOCK_MAX_INPUTS = 2 };

struct OrtValue {
  OrtMemoryDevice device;
  ONNXTensorElementDataType dtype;
  size_t rank;
  int64_t dims[MOCK_MAX_RANK];
  void *data;
  OrtAllocator *allocator; /* the allocator that owns `data`; NULL: not owned */
};

struct OrtKernelContext {
  size_t num_inputs, num_outputs;
  const OrtValue *inputs[MOCK_MAX_VALUES];
  OrtValue outputs[MOCK_MAX_VALUES];
  OrtAllocator *allocator; /* allocates the outputs */
  OrtMemoryDevice output_device;
  OrtSyncStream *stream;
  bool refuse_outputs; /* true: GetOutput fails */
};

struct OrtKeyValuePairs {
  size_t count;
  char keys[MOCK_MAX_PAIRS][96], values[MOCK_MAX_PAIRS][32];
};

struct OrtKernelDef {
  char op_type[32], domain[16], ep[64];
  int first_version, last_version;
  size_t num_types; /* number of types of constraint T or V */
  OrtMemType input_memory[MOCK_MAX_INPUTS], output_memory;
};

struct OrtKernelRegistry {
  size_t count;
  OrtKernelDef definitions[MOCK_MAX_KERNELS];
  OrtKernelCreateFunc create[MOCK_MAX_KERNELS];
};

/* Points ocp_api and ocp_ep_api to the mock tables, with this API version. */
void mock_ort_install(uint32_t version);

extern OrtKeyValuePairs mock_environment; /* configuration entries of ORT's environment */
extern atomic_int mock_live_statuses, mock_log_messages;

extern const OrtMemoryDevice mock_cpu;
OrtMemoryDevice mock_device(uint32_t vendor, uint32_t id, OrtDeviceMemoryType memory);
size_t mock_bytes(const OrtValue *value);
/* Makes a tensor with new memory; mock_free frees it. */
OrtValue mock_tensor(OrtAllocator *allocator, OrtMemoryDevice device, ONNXTensorElementDataType dtype, size_t rank,
                     const int64_t *dims);
OrtValue mock_wrap(void *data, OrtMemoryDevice device, ONNXTensorElementDataType dtype, size_t rank,
                   const int64_t *dims);
void mock_free(OrtValue *value);

#endif
