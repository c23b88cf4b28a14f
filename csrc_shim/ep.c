/* OrtEp. Claims and compilation go to Python; everything that can happen in a Run is C. A slot left NULL means what
 * ORT does by default: the factory's allocators, no profiler, no resource budget. */
#include "factory.h"
#include "ort_compute.h"
#include "ort_memory.h"

#include <stdlib.h>

typedef struct ocp_ep {
  OrtEp ort; /* first member: ORT's view */
  ocp_ep_config config;
} ocp_ep;

static const ocp_ep *self(const OrtEp *ep) { return (const ocp_ep *)ep; }

static const char *get_name(const OrtEp *ep) {
  (void)ep;
  return OCP_EP_NAME;
}

static OrtStatus *get_capability(OrtEp *ep, const OrtGraph *graph, OrtEpGraphSupportInfo *info) {
  ocp_error error = {0};
  const ocp_python *python = ocp_python_call(&error);
  return python ? python->get_capability(self(ep)->config.handle, graph, info) : ocp_status(&error);
}

static OrtStatus *compile(OrtEp *ep, const OrtGraph **graphs, const OrtNode **fused_nodes, size_t count,
                          OrtNodeComputeInfo **infos, OrtNode **ep_context_nodes) {
  /* Before anything else: ORT releases the infos even after a failure. */
  for (size_t i = 0; i < count; i++) {
    infos[i] = NULL;
    if (ep_context_nodes)
      ep_context_nodes[i] = NULL;
  }
  ocp_error error = {0};
  const ocp_python *python = ocp_python_call(&error);
  return python ? python->compile(self(ep)->config.handle, graphs, fused_nodes, count, infos, ep_context_nodes)
                : ocp_status(&error);
}

static void release_compute_infos(OrtEp *ep, OrtNodeComputeInfo **infos, size_t count) {
  (void)ep;
  for (size_t i = 0; i < count; i++) {
    if (infos[i])
      ocp_compute_info_release(infos[i]);
    infos[i] = NULL;
  }
}

static OrtStatus *get_preferred_layout(OrtEp *ep, OrtEpDataLayout *layout) {
  (void)ep;
  *layout = OrtEpDataLayout_NCHW;
  return NULL;
}

static OrtStatus *get_kernel_registry(OrtEp *ep, const OrtKernelRegistry **registry) {
  (void)ep;
  *registry = NULL;
  ocp_error error = {0};
  ocp_kernel_registry(registry, &error);
  return ocp_status(&error);
}

static OrtStatus *is_concurrent_run_supported(OrtEp *ep, bool *is_supported) {
  (void)ep;
  *is_supported = true;
  return NULL;
}

static OrtStatus *create_sync_stream(OrtEp *ep, const OrtMemoryDevice *memory_device, OrtSyncStreamImpl **out) {
  (void)memory_device; /* ORT asks for streams of the EP's device only */
  *out = NULL;
  ocp_error error = {0};
  ocp_stream *stream = self(ep)->config.stream;
  if (stream)
    ocp_stream_share(stream);
  else
    ocp_stream_create(self(ep)->config.device, &stream, &error);
  if (stream)
    *out = &stream->ort;
  return ocp_status(&error);
}

static OrtStatus *sync_device(OrtEp *ep) { return ocp_ort_synchronize_device(self(ep)->config.device); }

/* Here a Run on a lost device or in a forked child can say so: the allocation that fails next has no message. */
static OrtStatus *on_run_start(OrtEp *ep, const OrtRunOptions *options) {
  (void)options;
  ocp_error error;
  return ocp_device_check(self(ep)->config.device, &error) == ORT_OK ? NULL : ocp_status(&error);
}

static bool is_graph_capture_enabled(const OrtEp *ep) {
  (void)ep;
  return false;
}

static bool is_graph_captured(const OrtEp *ep, int graph_annotation_id) {
  (void)ep, (void)graph_annotation_id;
  return false;
}

static OrtStatus *replay_graph(OrtEp *ep, int graph_annotation_id) {
  (void)ep, (void)graph_annotation_id;
  return ocp_api->CreateStatus(ORT_NOT_IMPLEMENTED, "graph capture through ORT is not enabled");
}

static OrtStatus *get_default_memory_device(const OrtEp *ep, const OrtMemoryDevice **device) {
  *device = ocp_ep_api->MemoryInfo_GetMemoryDevice(self(ep)->config.device_memory);
  return NULL;
}

OrtEp *ocp_ep_create(const ocp_ep_config *config) {
  ocp_ep *ep = calloc(1, sizeof *ep);
  if (!ep)
    return NULL;
  ep->config = *config;
  ep->ort = (OrtEp){
      .ort_version_supported = ocp_api_version,
      .GetName = get_name,
      .GetCapability = get_capability,
      .Compile = compile,
      .ReleaseNodeComputeInfos = release_compute_infos,
      .GetPreferredDataLayout = get_preferred_layout,
      .OnRunStart = on_run_start,
      .CreateSyncStreamForDevice = create_sync_stream,
      .GetKernelRegistry = get_kernel_registry,
      .IsConcurrentRunSupported = is_concurrent_run_supported,
      .Sync = sync_device,
      .IsGraphCaptureEnabled = is_graph_capture_enabled,
      .IsGraphCaptured = is_graph_captured,
      .ReplayGraph = replay_graph,
  };
  if (ocp_api_version >= OrtEp_GetDefaultMemoryDevice_SINCE)
    ep->ort.GetDefaultMemoryDevice = get_default_memory_device;
  return &ep->ort;
}

void ocp_ep_release(OrtEp *ep) { free(ep); }

int64_t ocp_ep_handle(const OrtEp *ep) { return self(ep)->config.handle; }
