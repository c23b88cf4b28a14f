/* The OrtEp of a session. Python claims and compiles nodes; C executes Runs. Slots for allocators stay NULL: ORT then
 * uses the allocators of the factory.
 *
 * What ORT calls:
 *
 *     CreateEpFactories (entry.c)     once for each registration: starts or finds Python
 *     GetSupportedDevices             (factory.c, offer.c) lists the devices, without Python
 *     CreateEp                        (factory.c) -> Python, which fills an ocp_ep_config
 *     GetCapability, Compile          -> Python; each fused node gets an OrtNodeComputeInfo (compute.c)
 *     CreateSyncStreamForDevice       the thread's stream, the session's, or a new one (stream.c)
 *     OnRunStart                      takes a turn on the stream, or starts a capture (capture.c)
 *       Compute                       (compute.c) -> run/executor.c; ORT's allocators give the outputs (allocator.c)
 *       Memcpy kernels, CopyTensors   (kernels.c, memory.c) between a CPU node and a node of the plugin
 *     OnRunEnd                        ends the turn or the capture
 *     ReplayGraph                     instead of OnRunStart to OnRunEnd, once the Run is captured
 *     CreateProfiler                  for a profile of the session or of a Run (profiler.h)
 *     ReleaseEp                       (factory.c) clusters are released by Python
 *
 * Invariants:
 * - Between OnRunStart and OnRunEnd, Python is called only for new shapes (to build a plan or a transposition of Scan,
 *   to load a library's stored algorithm, or to replace a library call that is refused) and for callbacks of plans.
 * - Slots that call Python and return a status return an error after Python has shut down and after a fork. OnRunStart
 *   returns an error after a fork and on a lost device, so that such a Run does not start. */
#include "ort/ep.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/host.h"
#include "device/device.h"
#include "device/memory/memory.h"
#include "device/order.h"
#include "device/stream.h"
#include "ort/data/capture.h"
#include "ort/data/ep_state.h"
#include "ort/data/stream.h"
#include "ort/kernels/compute.h"
#include "ort/kernels/kernels.h"
#include "ort/profile/profiler.h"
#include "python/host.h"

static const ocp_ep *self(const OrtEp *ep) { return (const ocp_ep *)ep; }

static const char *get_name(const OrtEp *ep) { return ocp_ep_names[self(ep)->identity]; }

static OrtStatus *get_capability(OrtEp *ep, const OrtGraph *graph, OrtEpGraphSupportInfo *info) {
  ocp_error error = {0};
  const ocp_python *python = ocp_python_call(&error);
  return python ? ocp_python_status(python->get_capability(self(ep)->config.handle, graph, info)) : ocp_status(&error);
}

static OrtStatus *compile(OrtEp *ep, const OrtGraph **graphs, const OrtNode **fused_nodes, size_t count,
                          OrtNodeComputeInfo **infos, OrtNode **ep_context_nodes) {
  /* Cleared before the first possible failure: ORT releases the infos even after a failure. */
  for (size_t i = 0; i < count; i++) {
    infos[i] = NULL;
    if (ep_context_nodes)
      ep_context_nodes[i] = NULL;
  }
  ocp_error error = {0};
  const ocp_python *python = ocp_python_call(&error);
  return python ? ocp_python_status(
                      python->compile(self(ep)->config.handle, graphs, fused_nodes, count, infos, ep_context_nodes))
                : ocp_status(&error);
}

static const char *get_compatibility_info(OrtEp *ep, const OrtGraph *graph) {
  (void)graph;
  ocp_error error = {0};
  const char *info = "";
  const ocp_python *python = ocp_python_call(&error);
  OrtStatus *status = python ? ocp_python_status(python->compatibility_info(self(ep)->config.handle, &info)) : NULL;
  if (!status)
    return info;
  ocp_api->ReleaseStatus(status);
  return "";
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
  *layout = self(ep)->config.channels_last ? OrtEpDataLayout_NHWC : OrtEpDataLayout_NCHW;
  return NULL;
}

/* ORT asks whether to convert claimed nodes of this operator to NHWC. The answer is never "no preference", because ORT
 * would then use its own list of operators. */
static OrtStatus *should_convert_layout(OrtEp *ep, const char *domain, const char *op_type, OrtEpDataLayout layout,
                                        int *should_convert) {
  *should_convert = 0;
  if (layout != OrtEpDataLayout_NHWC || (*domain && strcmp(domain, "ai.onnx") != 0))
    return NULL;
  for (const char *const *name = self(ep)->config.channels_last; name && *name; name++)
    if (strcmp(*name, op_type) == 0)
      *should_convert = 1;
  return NULL;
}

static OrtStatus *set_dynamic_options(OrtEp *ep, const char *const *keys, const char *const *values, size_t count) {
  ocp_error error = {0};
  const ocp_python *python = ocp_python_call(&error);
  return python ? ocp_python_status(python->set_dynamic_options(self(ep)->config.handle, keys, values, count))
                : ocp_status(&error);
}

/* Returns the number of bytes that a model may use: the free memory of the device and of the plugin's arena, up to the
 * arena's limit. */
static OrtStatus *get_available_resource(const OrtEp *ep, OrtResourceCount *available) {
  ocp_error error = {0};
  uint64_t bytes = 0;
  *available = (OrtResourceCount){.kind = OrtResourceCountKind_None};
  if (ocp_device_available(self(ep)->config.device, &bytes, &error) == ORT_OK)
    *available = (OrtResourceCount){.kind = OrtResourceCountKind_TotalBytes, .value.total_bytes = bytes};
  return ocp_status(&error);
}

static OrtStatus *get_kernel_registry(OrtEp *ep, const OrtKernelRegistry **registry) {
  *registry = NULL;
  ocp_error error = {0};
  ocp_kernel_registry(self(ep)->identity, self(ep)->config.operators, registry, &error);
  return ocp_status(&error);
}

/* Always answers true: Runs that must not overlap take turns on their stream (ocp_stream_take_turn). If the answer were
 * false, ORT would hold a lock of the session during each Run. Python threads ask for that lock while they hold the
 * GIL, and a Run may need the GIL: a deadlock. */
static OrtStatus *is_concurrent_run_supported(OrtEp *ep, bool *is_supported) {
  (void)ep;
  *is_supported = true;
  return NULL;
}

static OrtStatus *create_sync_stream(OrtEp *ep, const OrtMemoryDevice *memory_device, OrtSyncStreamImpl **out) {
  (void)memory_device; /* ORT calls this only for the EP's device */
  *out = NULL;
  ocp_error error = {0};
  ocp_stream *stream = self(ep)->config.stream;
  if (self(ep)->capture)
    ocp_capture_stream(self(ep)->capture, &stream, &error);
  else if (stream)
    ocp_stream_share(stream);
  else
    ocp_stream_create(self(ep)->config.device, &stream, &error);
  if (stream && !(*out = ocp_ort_stream_view(stream, &error)))
    ocp_stream_release(stream);
  return ocp_status(&error);
}

static OrtStatus *create_profiler(OrtEp *ep, OrtEpProfilerImpl **profiler) {
  ocp_error error = {0};
  *profiler = ocp_profiler_create(self(ep)->config.device, get_name(ep), &error);
  return ocp_status(&error);
}

static OrtStatus *sync_device(OrtEp *ep) { return ocp_ort_synchronize_device(self(ep)->config.device); }

/* ---- capture of whole Runs ---- */

static OrtStatus *annotation_id(const OrtRunOptions *options, int *id) {
  const char *text = options ? ocp_api->GetRunConfigEntry(options, "gpu_graph_id") : NULL;
  *id = 0;
  if (!text || !*text)
    return NULL;
  char *end;
  errno = 0;
  const long value = strtol(text, &end, 10);
  if (errno || *end || value < -1 || value > INT_MAX)
    return ocp_api->CreateStatus(ORT_INVALID_ARGUMENT,
                                 "the run option gpu_graph_id takes a number from 0, or -1 for no capture");
  *id = (int)value;
  return NULL;
}

/* Starts a Run. Reports a lost device or a forked child here, because the Run's failing allocations could not report a
 * reason. */
static OrtStatus *on_run_start(OrtEp *ep, const OrtRunOptions *options) {
  ocp_error error;
  ocp_capture_forget_run();
  if (ocp_device_check(self(ep)->config.device, &error) != ORT_OK)
    return ocp_status(&error);
  OrtStatus *status = NULL;
  if (self(ep)->capture) {
    int id;
    status = annotation_id(options, &id);
    error.code = ORT_OK;
    if (!status && ocp_capture_run_start(self(ep)->capture, id, &error) != ORT_OK)
      status = ocp_status(&error);
  } else if (self(ep)->recordings) {
    error.code = ORT_OK;
    if (ocp_recordings_run_start(self(ep)->recordings, &error) != ORT_OK)
      status = ocp_status(&error);
  }
  if (!status)
    ocp_run_started();
  return status;
}

static OrtStatus *on_run_end(OrtEp *ep, const OrtRunOptions *options, bool sync_stream) {
  OrtStatus *status = NULL;
  if (self(ep)->capture) {
    int id;
    ocp_error error = {0};
    status = annotation_id(options, &id);
    if (!status && ocp_capture_run_end(self(ep)->capture, id, sync_stream, &error) != ORT_OK)
      status = ocp_status(&error);
  } else if (self(ep)->recordings) {
    ocp_recordings_run_end(self(ep)->recordings);
  }
  ocp_run_ended(self(ep)->config.device, sync_stream);
  return status;
}

static bool is_graph_capture_enabled(const OrtEp *ep) { return self(ep)->capture != NULL; }

static bool is_graph_captured(const OrtEp *ep, int graph_annotation_id) {
  return self(ep)->capture && ocp_capture_has(self(ep)->capture, graph_annotation_id);
}

static OrtStatus *replay_graph(OrtEp *ep, int graph_annotation_id) {
  if (!self(ep)->capture)
    return ocp_api->CreateStatus(ORT_NOT_IMPLEMENTED,
                                 "this session captures no CUDA graphs: create it with enable_cuda_graph=1");
  ocp_error error = {0};
  ocp_run_started();
  ocp_capture_replay(self(ep)->capture, graph_annotation_id, &error);
  ocp_run_ended(self(ep)->config.device, /*waited=*/error.code == ORT_OK);
  return ocp_status(&error);
}

static OrtStatus *release_captured_graph(OrtEp *ep, int graph_annotation_id) {
  if (self(ep)->capture)
    ocp_capture_release(self(ep)->capture, graph_annotation_id);
  return NULL;
}

static OrtGraphCaptureNodeAssignmentPolicy get_capture_policy(const OrtEp *ep) {
  (void)ep;
  return OrtGraphCaptureNodeAssignmentPolicy_ALLOW_CPU_FOR_SHAPES;
}

static OrtStatus *get_default_memory_device(const OrtEp *ep, const OrtMemoryDevice **device) {
  *device = ocp_ep_api->MemoryInfo_GetMemoryDevice(self(ep)->config.device_memory);
  return NULL;
}

/* Compiled models can leave their weights in the source model, inside or outside of its file. */
static OrtStatus *get_weightless_support(const OrtEp *ep, OrtWeightlessSupport *support) {
  (void)ep;
  *support = OrtWeightlessSupport_ALL;
  return NULL;
}

/* The application can set functions that read and write the files of compiled models. */
static OrtStatus *get_context_data_support(const OrtEp *ep, uint32_t *flags) {
  (void)ep;
  const uint32_t reads = 1, writes = 2;
  *flags = reads | writes;
  return NULL;
}

OrtEp *ocp_ep_create(const ocp_ep_config *config, ocp_identity identity) {
  ocp_ep *ep = calloc(1, sizeof *ep);
  if (!ep)
    return NULL;
  ep->config = *config;
  ep->identity = identity;
  if (config->capture_warm_runs &&
      !(ep->capture = ocp_capture_create(config->device, config->stream, config->capture_warm_runs))) {
    free(ep);
    return NULL;
  }
  if (config->stream && !config->stream->owned && !ep->capture &&
      !(ep->recordings = ocp_recordings_create(config->stream))) {
    free(ep);
    return NULL;
  }
  ep->ort = (OrtEp){
      .ort_version_supported = ocp_api_version,
      .GetName = get_name,
      .GetCapability = get_capability,
      .Compile = compile,
      .ReleaseNodeComputeInfos = release_compute_infos,
      .GetPreferredDataLayout = get_preferred_layout,
      .ShouldConvertDataLayoutForOp = should_convert_layout,
      .SetDynamicOptions = set_dynamic_options,
      .OnRunStart = on_run_start,
      .OnRunEnd = on_run_end,
      .CreateSyncStreamForDevice = create_sync_stream,
      .GetCompiledModelCompatibilityInfo = get_compatibility_info,
      .GetKernelRegistry = get_kernel_registry,
      .IsConcurrentRunSupported = is_concurrent_run_supported,
      .Sync = sync_device,
      .IsGraphCaptureEnabled = is_graph_capture_enabled,
      .IsGraphCaptured = is_graph_captured,
      .ReplayGraph = replay_graph,
      .GetGraphCaptureNodeAssignmentPolicy = get_capture_policy,
      .CreateProfiler = create_profiler,
      .GetAvailableResource = get_available_resource,
  };
  if (ocp_api_version >= OrtEp_GetDefaultMemoryDevice_SINCE)
    ep->ort.GetDefaultMemoryDevice = get_default_memory_device;
  if (ocp_api_version >= OrtEp_ReleaseCapturedGraph_SINCE)
    ep->ort.ReleaseCapturedGraph = release_captured_graph;
  if (ocp_api_version >= OrtEp_GetWeightlessSupport_SINCE)
    ep->ort.GetWeightlessSupport = get_weightless_support;
  if (ocp_host_version >= OrtEp_GetEpContextDataSupport_SINCE) {
    ep->ort.ort_version_supported = OrtEp_GetEpContextDataSupport_SINCE; /* newer_slots has room for these slots */
    ep->ort.GetEpContextDataSupport = get_context_data_support;
  }
  return &ep->ort;
}

void ocp_ep_close(OrtEp *ep) {
  ocp_ep *own = (ocp_ep *)(void *)ep;
  ocp_capture_destroy(own->capture);
  own->capture = NULL;
  ocp_recordings_destroy(own->recordings);
  own->recordings = NULL;
}

void ocp_ep_release(OrtEp *ep) { free(ep); }
