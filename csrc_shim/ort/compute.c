/* OrtNodeComputeInfo over an ocp_cluster: from ORT's values to ocp_input, and back. No GIL, no Python, no allocation.
 */
#include "ort/compute.h"

#include <stdlib.h>

#include "base/host.h"
#include "device/stream.h"
#include "device/wait.h"
#include "ort/allocator.h"
#include "ort/capture.h"
#include "ort/stream.h"
#include "run/executor.h"
#include "run/input.h"

enum { INPUTS_ON_STACK = 32 };

typedef struct compute_info {
  OrtNodeComputeInfo ort;
  ocp_cluster *cluster;
  ocp_device *device;
  uint32_t num_inputs, num_outputs;
  const OrtMemoryDevice *device_memory; /* of our device: where inputs normally are */
} compute_info;

static OrtStatus *create_state(OrtNodeComputeInfo *this_ptr, OrtNodeComputeContext *context, void **state) {
  (void)context;
  *state = this_ptr; /* Runs share it; what one Run needs is on its stack */
  return NULL;
}

static void release_state(OrtNodeComputeInfo *this_ptr, void *state) {
  (void)this_ptr;
  (void)state;
}

static bool is_empty(const int64_t *dims, size_t rank) {
  bool empty = false;
  for (size_t i = 0; i < rank; i++)
    empty |= dims[i] == 0;
  return empty;
}

static int gather_input(const compute_info *self, const OrtKernelContext *context, uint32_t index, ocp_input *input,
                        ocp_error *error) {
  const OrtValue *value = NULL;
  ONNXTensorElementDataType dtype = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  size_t rank = 0;
  OrtStatus *status = ocp_api->KernelContext_GetInput(context, index, &value);
  if (!status && !value)
    return ocp_fail(error, ORT_INVALID_ARGUMENT, "input %u is missing", index);
  if (!status)
    status = ocp_api->GetTensorElementTypeAndShapeDataReference(value, &dtype, &input->dims, &rank);
  if (!status)
    status = ocp_api->GetTensorData(value, &input->data);
  if (status)
    return ocp_fail_status(error, status);
  if (!input->data && !is_empty(input->dims, rank))
    return ocp_fail(error, ORT_EP_FAIL, "input %u has no memory: %s", index, ocp_ort_why_no_memory());
  input->dtype = (uint32_t)dtype;
  input->rank = (uint32_t)rank;
  /* ORT can hand over host memory; so could a caller with memory of another device of ours. */
  const OrtMemoryDevice *memory = ocp_ep_api->Value_GetMemoryDevice(value);
  input->on_device = ocp_ep_api->MemoryDevice_AreEqual(memory, self->device_memory);
  if (!input->on_device && ocp_ep_api->MemoryDevice_GetDeviceType(memory) != OrtMemoryInfoDeviceType_CPU &&
      ocp_ep_api->MemoryDevice_GetMemoryType(memory) == OrtDeviceMemoryType_DEFAULT)
    return ocp_fail(error, ORT_INVALID_ARGUMENT, "input %u is in the memory of another device", index);
  return ORT_OK;
}

static int allocate_output(void *context, uint32_t index, const int64_t *dims, uint32_t rank, void **data,
                           ocp_error *error) {
  OrtValue *value = NULL;
  OrtStatus *status = ocp_api->KernelContext_GetOutput(context, index, dims, rank, &value);
  *data = NULL;
  if (!status && value)
    status = ocp_api->GetTensorMutableData(value, data);
  if (status)
    return ocp_fail_status(error, status);
  /* ORT makes a tensor of what its allocator gave, also of nothing. */
  return *data || !value || is_empty(dims, rank) ? ORT_OK : ocp_fail(error, ORT_EP_FAIL, "%s", ocp_ort_why_no_memory());
}

static int run(const compute_info *self, OrtKernelContext *context, ocp_input *inputs, ocp_error *error) {
  ocp_stream *stream = NULL;
  for (uint32_t i = 0; i < self->num_inputs; i++)
    if (gather_input(self, context, i, &inputs[i], error) != ORT_OK)
      return error->code;
  if (ocp_ort_stream_of_context(context, self->device, &stream, error) != ORT_OK)
    return error->code;
  bool borrowed = !stream;
  if (borrowed &&
      (ocp_device_settle(self->device, error) != ORT_OK || ocp_stream_borrow(self->device, &stream, error) != ORT_OK))
    return error->code;
  ocp_ort_allocating_on(borrowed ? NULL : stream);
  ocp_cluster_run(self->cluster, stream, inputs, self->num_inputs, allocate_output, (void *)context, error);
  ocp_ort_allocating_on(NULL);
  ocp_capture_computed(stream, error->code == ORT_OK);
  if (borrowed) {
    ocp_error late = {0};
    if (ocp_stream_synchronize(stream, &late) != ORT_OK && error->code == ORT_OK)
      *error = late;
    ocp_stream_return(stream);
  }
  return error->code;
}

static OrtStatus *compute(OrtNodeComputeInfo *this_ptr, void *state, OrtKernelContext *context) {
  (void)state;
  const compute_info *self = (const compute_info *)(const void *)this_ptr;
  ocp_input on_stack[INPUTS_ON_STACK], *inputs = on_stack;
  ocp_error error;
  error.code = ORT_OK; /* without clearing the text */
  if (self->num_inputs > INPUTS_ON_STACK && !(inputs = malloc(self->num_inputs * sizeof *inputs)))
    ocp_fail(&error, ORT_FAIL, "out of host memory");
  else
    run(self, context, inputs, &error);
  if (inputs != on_stack)
    free(inputs);
  return ocp_status(&error);
}

OrtNodeComputeInfo *ocp_compute_info_create(ocp_cluster *cluster, ocp_device *device, uint32_t num_inputs,
                                            uint32_t num_outputs, ocp_error *error) {
  const OrtMemoryInfo *memory_info = NULL;
  if (ocp_ort_memory_info(device->emulated, device->ordinal, OCP_INFO_DEVICE, &memory_info, error) != ORT_OK)
    return NULL;
  compute_info *self = calloc(1, sizeof *self);
  if (!self) {
    ocp_fail(error, ORT_FAIL, "out of host memory");
    return NULL;
  }
  *self = (compute_info){
      .ort = {.ort_version_supported = ocp_api_version,
              .CreateState = create_state,
              .Compute = compute,
              .ReleaseState = release_state},
      .cluster = cluster,
      .device = device,
      .num_inputs = num_inputs,
      .num_outputs = num_outputs,
      .device_memory = ocp_ep_api->MemoryInfo_GetMemoryDevice(memory_info),
  };
  return &self->ort;
}

void ocp_compute_info_release(OrtNodeComputeInfo *info) { free(info); }
