/* An execution provider that does nothing: it claims every node, allocates outputs and leaves them uninitialized.
 * The cost of its Run is ONNX Runtime's own cost for a plugin with memory and streams. Its "device" is host memory
 * under an unused vendor id. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/ort_abi.h"

#define NAME "NullExecutionProvider"
enum { VENDOR = 0x10DE0F };

static const OrtApi *api;
static const OrtEpApi *ep_api;
static uint32_t version;
static OrtMemoryInfo *memory_info;
static OrtHardwareDevice *hardware;

/* ---- memory: two freed blocks are reused, so that the time of malloc is not measured ---- */

static _Atomic(void *) spare[2];

static void *allocate(OrtAllocator *this_, size_t size) {
  (void)this_;
  for (int i = 0; size <= 256 && i < 2; i++) {
    void *kept = atomic_exchange(&spare[i], NULL);
    if (kept)
      return kept;
  }
  return malloc(size < 256 ? 256 : size);
}

static void *allocate_on_stream(OrtAllocator *this_, size_t size, OrtSyncStream *stream) {
  (void)stream;
  return allocate(this_, size);
}

static void give_back(OrtAllocator *this_, void *address) {
  (void)this_;
  for (int i = 0; i < 2; i++) {
    void *none = NULL;
    if (atomic_compare_exchange_strong(&spare[i], &none, address))
      return;
  }
  free(address);
}

static const OrtMemoryInfo *allocator_info(const OrtAllocator *this_) {
  (void)this_;
  return memory_info;
}

static OrtStatus *create_allocator(OrtEpFactory *factory, const OrtMemoryInfo *info, const OrtKeyValuePairs *options,
                                   OrtAllocator **out) {
  (void)factory, (void)info, (void)options;
  static OrtAllocator allocator = {.Alloc = allocate,
                                   .Free = give_back,
                                   .Info = allocator_info,
                                   .Reserve = allocate,
                                   .AllocOnStream = allocate_on_stream};
  allocator.version = version;
  *out = &allocator;
  return NULL;
}

static void release_allocator(OrtEpFactory *factory, OrtAllocator *allocator) { (void)factory, (void)allocator; }

static void release_transfer(OrtDataTransferImpl *this_ptr) { (void)this_ptr; }

static bool can_copy(const OrtDataTransferImpl *this_ptr, const OrtMemoryDevice *src, const OrtMemoryDevice *dst) {
  (void)this_ptr;
  return ep_api->MemoryDevice_GetVendorId(src) == VENDOR || ep_api->MemoryDevice_GetVendorId(dst) == VENDOR;
}

static OrtStatus *copy_tensors(OrtDataTransferImpl *this_ptr, const OrtValue **src, OrtValue **dst,
                               OrtSyncStream **streams, size_t count) {
  (void)this_ptr, (void)streams;
  for (size_t i = 0; i < count; i++) {
    const void *from = NULL;
    void *to = NULL;
    size_t bytes = 0;
    OrtStatus *status = api->GetTensorSizeInBytes(src[i], &bytes);
    if (status || (status = api->GetTensorData(src[i], &from)) || (status = api->GetTensorMutableData(dst[i], &to)))
      return status;
    memcpy(to, from, bytes);
  }
  return NULL;
}

static OrtStatus *create_transfer(OrtEpFactory *factory, OrtDataTransferImpl **out) {
  (void)factory;
  static OrtDataTransferImpl transfer = {.Release = release_transfer, .CanCopy = can_copy, .CopyTensors = copy_tensors};
  transfer.ort_version_supported = version;
  *out = &transfer;
  return NULL;
}

/* ---- streams ---- */

static void release_notification(OrtSyncNotificationImpl *this_ptr) { (void)this_ptr; }
static OrtStatus *activate(OrtSyncNotificationImpl *this_ptr) { return (void)this_ptr, NULL; }
static OrtStatus *wait_on_device(OrtSyncNotificationImpl *this_ptr, OrtSyncStream *stream) {
  return (void)this_ptr, (void)stream, NULL;
}
static OrtStatus *wait_on_host(OrtSyncNotificationImpl *this_ptr) { return (void)this_ptr, NULL; }

static OrtStatus *create_notification(OrtSyncStreamImpl *this_ptr, OrtSyncNotificationImpl **out) {
  (void)this_ptr;
  static OrtSyncNotificationImpl notification = {.Release = release_notification,
                                                 .Activate = activate,
                                                 .WaitOnDevice = wait_on_device,
                                                 .WaitOnHost = wait_on_host};
  notification.ort_version_supported = version;
  *out = &notification;
  return NULL;
}

static void release_stream(OrtSyncStreamImpl *this_ptr) { (void)this_ptr; }
static void *stream_handle(OrtSyncStreamImpl *this_ptr) { return this_ptr; }
static OrtStatus *stream_wait(OrtSyncStreamImpl *this_ptr) { return (void)this_ptr, NULL; }

static bool is_stream_aware(const OrtEpFactory *factory) { return (void)factory, true; }

static OrtStatus *create_stream(OrtEpFactory *factory, const OrtMemoryDevice *device, const OrtKeyValuePairs *options,
                                OrtSyncStreamImpl **out) {
  (void)factory, (void)device, (void)options;
  static OrtSyncStreamImpl stream = {.Release = release_stream,
                                     .GetHandle = stream_handle,
                                     .CreateNotification = create_notification,
                                     .Flush = stream_wait,
                                     .OnSessionRunEnd = stream_wait};
  stream.ort_version_supported = version;
  *out = &stream;
  return NULL;
}

/* ---- computation ---- */

static OrtStatus *create_state(OrtNodeComputeInfo *this_ptr, OrtNodeComputeContext *context, void **state) {
  (void)context;
  *state = this_ptr;
  return NULL;
}

static OrtStatus *compute(OrtNodeComputeInfo *this_ptr, void *state, OrtKernelContext *context) {
  (void)this_ptr, (void)state;
  const OrtValue *input = NULL;
  OrtValue *output = NULL;
  ONNXTensorElementDataType type;
  const int64_t *dims = NULL;
  size_t rank = 0;
  OrtStatus *status = api->KernelContext_GetInput(context, 0, &input);
  if (status || (status = api->GetTensorElementTypeAndShapeDataReference(input, &type, &dims, &rank)))
    return status;
  return api->KernelContext_GetOutput(context, 0, dims, rank, &output);
}

static void release_state(OrtNodeComputeInfo *this_ptr, void *state) { (void)this_ptr, (void)state; }

static const char *ep_name(const OrtEp *ep) { return (void)ep, NAME; }

static OrtStatus *get_capability(OrtEp *ep, const OrtGraph *graph, OrtEpGraphSupportInfo *info) {
  (void)ep;
  const OrtNode *nodes[64];
  size_t count = 0;
  OrtStatus *status = api->Graph_GetNumNodes(graph, &count);
  if (status || count == 0 || count > 64 || (status = api->Graph_GetNodes(graph, nodes, count)))
    return status;
  OrtNodeFusionOptions options = {.ort_version_supported = version};
  return ep_api->EpGraphSupportInfo_AddNodesToFuse(info, nodes, count, &options);
}

static OrtStatus *compile(OrtEp *ep, const OrtGraph **graphs, const OrtNode **nodes, size_t count,
                          OrtNodeComputeInfo **infos, OrtNode **ep_context_nodes) {
  (void)ep, (void)graphs, (void)nodes, (void)ep_context_nodes;
  static OrtNodeComputeInfo info = {.CreateState = create_state, .Compute = compute, .ReleaseState = release_state};
  info.ort_version_supported = version;
  for (size_t i = 0; i < count; i++)
    infos[i] = &info;
  return NULL;
}

static void release_infos(OrtEp *ep, OrtNodeComputeInfo **infos, size_t count) { (void)ep, (void)infos, (void)count; }
static OrtStatus *is_concurrent(OrtEp *ep, bool *out) { return (void)ep, *out = true, NULL; }

/* ---- factory ---- */

static const char *factory_name(const OrtEpFactory *factory) { return (void)factory, NAME; }
static const char *factory_vendor(const OrtEpFactory *factory) { return (void)factory, "nobody"; }
static uint32_t factory_vendor_id(const OrtEpFactory *factory) { return (void)factory, VENDOR; }
static const char *factory_version(const OrtEpFactory *factory) { return (void)factory, "1.0.0"; }

static OrtStatus *get_devices(OrtEpFactory *factory, const OrtHardwareDevice *const *devices, size_t num_devices,
                              OrtEpDevice **ep_devices, size_t max_ep_devices, size_t *num_ep_devices) {
  (void)devices, (void)num_devices, (void)max_ep_devices;
  *num_ep_devices = 0;
  OrtStatus *status = ep_api->CreateHardwareDevice(OrtHardwareDeviceType_GPU, VENDOR, 0, "nobody", NULL, &hardware);
  if (status || (status = ep_api->CreateEpDevice(factory, hardware, NULL, NULL, &ep_devices[0])))
    return status;
  *num_ep_devices = 1;
  return ep_api->EpDevice_AddAllocatorInfo(ep_devices[0], memory_info);
}

static OrtStatus *create_ep(OrtEpFactory *factory, const OrtHardwareDevice *const *devices,
                            const OrtKeyValuePairs *const *metadata, size_t num_devices,
                            const OrtSessionOptions *options, const OrtLogger *logger, OrtEp **out) {
  (void)factory, (void)devices, (void)metadata, (void)num_devices, (void)options, (void)logger;
  static OrtEp ep = {.GetName = ep_name,
                     .GetCapability = get_capability,
                     .Compile = compile,
                     .ReleaseNodeComputeInfos = release_infos,
                     .IsConcurrentRunSupported = is_concurrent};
  ep.ort_version_supported = version;
  *out = &ep;
  return NULL;
}

static void release_ep(OrtEpFactory *factory, OrtEp *ep) { (void)factory, (void)ep; }

static OrtStatus *validate(OrtEpFactory *factory, const OrtHardwareDevice *const *devices, size_t num_devices,
                           const char *info, OrtCompiledModelCompatibility *out) {
  (void)factory, (void)devices, (void)num_devices, (void)info;
  *out = OrtCompiledModelCompatibility_EP_NOT_APPLICABLE;
  return NULL;
}

static OrtStatus *no_domains(OrtEpFactory *factory, size_t *count) { return (void)factory, *count = 0, NULL; }

#define EXPORT __attribute__((visibility("default")))
EXPORT OrtStatus *CreateEpFactories(const char *registered_name, const OrtApiBase *api_base, const OrtLogger *logger,
                                    OrtEpFactory **factories, size_t max_factories, size_t *num_factories);
EXPORT OrtStatus *ReleaseEpFactory(OrtEpFactory *factory);

OrtStatus *CreateEpFactories(const char *registered_name, const OrtApiBase *api_base, const OrtLogger *logger,
                             OrtEpFactory **factories, size_t max_factories, size_t *num_factories) {
  (void)registered_name, (void)logger, (void)max_factories;
  static OrtEpFactory factory = {.GetName = factory_name,
                                 .GetVendor = factory_vendor,
                                 .GetSupportedDevices = get_devices,
                                 .CreateEp = create_ep,
                                 .ReleaseEp = release_ep,
                                 .GetVendorId = factory_vendor_id,
                                 .GetVersion = factory_version,
                                 .ValidateCompiledModelCompatibilityInfo = validate,
                                 .CreateAllocator = create_allocator,
                                 .ReleaseAllocator = release_allocator,
                                 .CreateDataTransfer = create_transfer,
                                 .IsStreamAware = is_stream_aware,
                                 .CreateSyncStreamForDevice = create_stream,
                                 .GetNumCustomOpDomains = no_domains};
  version = OCP_OLDEST_API;
  api = api_base->GetApi(version);
  ep_api = api->GetEpApi();
  factory.ort_version_supported = version;
  factories[0] = &factory;
  *num_factories = 1;
  return api->CreateMemoryInfo_V2("Null", OrtMemoryInfoDeviceType_GPU, VENDOR, 0, OrtDeviceMemoryType_DEFAULT, 0,
                                  OrtDeviceAllocator, &memory_info);
}

OrtStatus *ReleaseEpFactory(OrtEpFactory *factory) {
  (void)factory;
  ep_api->ReleaseHardwareDevice(hardware);
  api->ReleaseMemoryInfo(memory_info);
  return NULL;
}
