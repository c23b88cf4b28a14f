/* The kernel registries of the EP. This file adds control flow, and MemcpyFromHost and MemcpyToHost, which ORT inserts
 * between a CPU node and a node of the plugin inside a graph. Python adds the kernels of the operator table. */
#include "ort/kernels/kernels.h"

#include <pthread.h>
#include <stdlib.h>

#include "base/host.h"
#include "device/device.h"
#include "device/stream.h"
#include "ort/data/ep_state.h"
#include "ort/data/memory.h"
#include "ort/data/stream.h"
#include "ort/kernels/control_flow.h"
#include "python/host.h"

/* The highest ONNXTensorElementDataType, plus one. */
enum { NUM_TYPES = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E8M0 + 1 };

static OrtStatus *kernel_compute(OrtKernelImpl *this_ptr, OrtKernelContext *context) {
  (void)this_ptr;
  const OrtValue *src = NULL;
  OrtValue *dst = NULL;
  ONNXTensorElementDataType dtype;
  const int64_t *dims = NULL;
  size_t rank = 0;
  OrtStatus *status;
  if ((status = ocp_api->KernelContext_GetInput(context, 0, &src)) ||
      (status = ocp_api->GetTensorElementTypeAndShapeDataReference(src, &dtype, &dims, &rank)) ||
      (status = ocp_api->KernelContext_GetOutput(context, 0, dims, rank, &dst)) || !dst)
    return status;
  ocp_error error = {0};
  ocp_stream *stream = NULL;
  const ocp_device *device = ocp_ort_copying_device(src, dst, &error);
  if (device && ocp_ort_stream_of_context(context, device, &stream, &error) == ORT_OK)
    ocp_ort_copy_tensor(src, dst, stream, &error);
  return ocp_status(&error);
}

static void kernel_release(OrtKernelImpl *this_ptr) { free(this_ptr); }

static OrtStatus *kernel_create(void *state, const OrtKernelInfo *info, OrtKernelImpl **out) {
  (void)state;
  (void)info;
  *out = calloc(1, sizeof **out);
  if (!*out)
    return ocp_api->CreateStatus(ORT_FAIL, OCP_OUT_OF_HOST_MEMORY);
  (*out)->ort_version_supported = ocp_api_version;
  (*out)->Compute = kernel_compute;
  (*out)->Release = kernel_release;
  return NULL;
}

static OrtStatus *add_kernel(OrtKernelRegistry *registry, ocp_identity identity, OrtKernelDefBuilder *builder,
                             const char *op_type, const OrtDataType *const *types, size_t num_types) {
  OrtKernelDef *definition = NULL;
  OrtStatus *status;
  if ((status = ocp_ep_api->KernelDefBuilder_SetOperatorType(builder, op_type)) ||
      (status = ocp_ep_api->KernelDefBuilder_SetDomain(builder, "")) ||
      (status = ocp_ep_api->KernelDefBuilder_SetSinceVersion(builder, 1, 1)) ||
      (status = ocp_ep_api->KernelDefBuilder_SetExecutionProvider(builder, ocp_ep_names[identity])) ||
      (status = ocp_ep_api->KernelDefBuilder_AddTypeConstraint(builder, "T", types, num_types)) ||
      (status = ocp_ep_api->KernelDefBuilder_Build(builder, &definition)))
    return status;
  status = ocp_ep_api->KernelRegistry_AddKernel(registry, definition, kernel_create, NULL);
  ocp_ep_api->ReleaseKernelDef(definition);
  return status;
}

static OrtStatus *add_memcpy(OrtKernelRegistry *registry, ocp_identity identity, bool to_host,
                             const OrtDataType *const *types, size_t num_types) {
  OrtKernelDefBuilder *builder = NULL;
  OrtStatus *status = ocp_ep_api->CreateKernelDefBuilder(&builder);
  if (status)
    return status;
  status = to_host ? ocp_ep_api->KernelDefBuilder_SetOutputMemType(builder, 0, OrtMemTypeCPUOutput)
                   : ocp_ep_api->KernelDefBuilder_SetInputMemType(builder, 0, OrtMemTypeCPUInput);
  if (!status)
    status = add_kernel(registry, identity, builder, to_host ? "MemcpyToHost" : "MemcpyFromHost", types, num_types);
  ocp_ep_api->ReleaseKernelDefBuilder(builder);
  return status;
}

static OrtStatus *fill(OrtKernelRegistry *registry, ocp_identity identity) {
  const OrtDataType *types[NUM_TYPES];
  size_t num_types = 0;
  for (int type = 1; type < NUM_TYPES; type++) {
    if (type == ONNX_TENSOR_ELEMENT_DATA_TYPE_STRING)
      continue; /* strings live in host memory only */
    OrtStatus *status = ocp_ep_api->GetTensorDataType((ONNXTensorElementDataType)type, &types[num_types]);
    if (status)
      ocp_api->ReleaseStatus(status); /* this ORT does not know the type, or not as a tensor's element */
    else
      num_types++;
  }
  OrtStatus *status = add_memcpy(registry, identity, /*to_host=*/false, types, num_types);
  if (!status)
    status = add_memcpy(registry, identity, /*to_host=*/true, types, num_types);
  return status ? status : ocp_ort_add_control_flow(registry, identity);
}

OrtStatus *ocp_create_node_kernel(void *state, const OrtKernelInfo *info, OrtKernelImpl **out) {
  (void)state;
  const OrtEp *ep = NULL;
  *out = NULL;
  OrtStatus *status = ocp_ep_api->KernelInfo_GetEp(info, &ep);
  if (status)
    return status;
  ocp_error error = {0};
  const ocp_python *python = ocp_python_call(&error);
  return python ? ocp_python_status(python->create_kernel(ocp_ep_config_of(ep)->handle, info, out))
                : ocp_status(&error);
}

static OrtStatus *add_operators(OrtKernelRegistry *registry, ocp_identity identity, int64_t operators) {
  ocp_error error = {0};
  const ocp_python *python = ocp_python_call(&error);
  return python ? ocp_python_status(python->add_kernels(registry, ocp_ep_names[identity], operators))
                : ocp_status(&error);
}

typedef struct made_registry {
  struct made_registry *earlier;
  OrtKernelRegistry *registry;
  ocp_identity identity;
  int64_t operators;
} made_registry;

static const made_registry *find(const made_registry *latest, ocp_identity identity, int64_t operators) {
  while (latest && (latest->identity != identity || latest->operators != operators))
    latest = latest->earlier;
  return latest;
}

int ocp_kernel_registry(ocp_identity identity, int64_t operators, const OrtKernelRegistry **out, ocp_error *error) {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  static made_registry *latest;
  pthread_mutex_lock(&lock);
  const made_registry *known = find(latest, identity, operators);
  pthread_mutex_unlock(&lock);
  if (known) {
    *out = known->registry;
    return ORT_OK;
  }
  /* Not under the lock: add_operators calls Python, which waits for the GIL, whose holder may wait for the lock. */
  made_registry *made = calloc(1, sizeof *made);
  if (!made)
    return ocp_fail_memory(error);
  made->identity = identity;
  made->operators = operators;
  OrtStatus *status;
  if ((status = ocp_ep_api->CreateKernelRegistry(&made->registry)) || (status = fill(made->registry, identity)) ||
      (status = add_operators(made->registry, identity, operators))) {
    if (made->registry)
      ocp_ep_api->ReleaseKernelRegistry(made->registry);
    free(made);
    return ocp_fail_status(error, status);
  }
  pthread_mutex_lock(&lock);
  known = find(latest, identity, operators);
  if (!known) {
    made->earlier = latest;
    known = latest = made;
    made = NULL;
  }
  *out = known->registry;
  pthread_mutex_unlock(&lock);
  if (made) {
    ocp_ep_api->ReleaseKernelRegistry(made->registry);
    free(made);
  }
  return ORT_OK;
}
