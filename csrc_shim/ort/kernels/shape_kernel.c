#include "ort/kernels/shape_kernel.h"

#include <stdlib.h>
#include <string.h>

#include "base/host.h"

typedef struct shape_kernel {
  OrtKernelImpl ort;
  bool is_size;
  int64_t start, end; /* attributes of Shape */
} shape_kernel;

static int64_t clamp(int64_t axis, int64_t rank) {
  axis += axis < 0 ? rank : 0;
  return axis < 0 ? 0 : axis > rank ? rank : axis;
}

static OrtStatus *compute(OrtKernelImpl *this_ptr, OrtKernelContext *context) {
  const shape_kernel *self = (const shape_kernel *)(const void *)this_ptr;
  const OrtValue *input = NULL;
  OrtValue *output = NULL;
  ONNXTensorElementDataType dtype;
  const int64_t *dims = NULL;
  size_t rank = 0;
  void *data = NULL;
  OrtStatus *status;
  if ((status = ocp_api->KernelContext_GetInput(context, 0, &input)) ||
      (status = ocp_api->GetTensorElementTypeAndShapeDataReference(input, &dtype, &dims, &rank)))
    return status;
  const int64_t first = clamp(self->start, (int64_t)rank), last = clamp(self->end, (int64_t)rank);
  const int64_t count = last > first ? last - first : 0;
  if ((status = ocp_api->KernelContext_GetOutput(context, 0, &count, self->is_size ? 0 : 1, &output)) || !output ||
      (status = ocp_api->GetTensorMutableData(output, &data)))
    return status;
  if (!self->is_size) {
    if (count)
      memcpy(data, dims + first, (size_t)count * sizeof *dims);
    return NULL;
  }
  int64_t size = 1;
  for (size_t i = 0; i < rank; i++)
    size *= dims[i];
  memcpy(data, &size, sizeof size);
  return NULL;
}

static void release(OrtKernelImpl *this_ptr) { free(this_ptr); }

static int64_t attribute(const OrtKernelInfo *info, const char *name, int64_t otherwise) {
  int64_t value = otherwise;
  OrtStatus *status = ocp_api->KernelInfoGetAttribute_int64(info, name, &value);
  if (!status)
    return value;
  ocp_api->ReleaseStatus(status); /* the node lacks the attribute */
  return otherwise;
}

OrtStatus *ocp_create_shape_kernel(void *state, const OrtKernelInfo *info, OrtKernelImpl **out) {
  (void)state;
  *out = NULL;
  char name[8] = "";
  size_t length = sizeof name;
  OrtStatus *status = ocp_api->KernelInfo_GetOperatorType(info, name, &length);
  if (status)
    return status;
  shape_kernel *self = calloc(1, sizeof *self);
  if (!self)
    return ocp_api->CreateStatus(ORT_FAIL, OCP_OUT_OF_HOST_MEMORY);
  *self = (shape_kernel){.ort = {.ort_version_supported = ocp_api_version, .Compute = compute, .Release = release},
                         .is_size = strcmp(name, "Size") == 0,
                         .start = attribute(info, "start", 0),
                         .end = attribute(info, "end", INT64_MAX)};
  *out = &self->ort;
  return NULL;
}
