#include "ort/profile/profiler.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/host.h"
#include "base/process.h"
#include "device/wait.h"
#include "driver/activity.h"
#include "ort/profile/profile_event.h"
#include "python/host.h"
#include "run/instance/sources.h"

enum { MAX_SEEN = 1000000 }; /* maximum number of ORT's events that are kept; ORT drops its events beyond this number */

typedef struct profiler {
  OrtEpProfilerImpl ort; /* first member: ORT's view */
  ocp_device *device;
  const char *provider;
  ocp_listener *listener; /* lives as long as the profiler: threads may use it after the end of the profile */
  bool is_started;
  bool traced;          /* Python has started CUPTI for this profile */
  pthread_mutex_t lock; /* guards the members below */
  int64_t origin;       /* start of ORT's profile, CLOCK_MONOTONIC nanoseconds */
  ocp_profile_names names;
  ocp_profile_parent *parents; /* ORT's events that have ended */
  size_t num_parents, max_parents;
} profiler;

static profiler *self(OrtEpProfilerImpl *impl) { return (profiler *)(void *)impl; }

/* Starts CUPTI, which reports a GPU's activities. If CUPTI is unavailable, Python logs the reason, and the profile has
 * no GPU activities. */
static void begin_trace(profiler *p) {
  ocp_error error = {0};
  const ocp_python *python = p->device->emulated ? NULL : ocp_python_call(&error);
  if (!python)
    return;
  p->traced = python->trace_begin(&error) == ORT_OK;
  ocp_python_returned();
  static atomic_bool said;
  if (!p->traced && !atomic_exchange(&said, true))
    ocp_log(ORT_LOGGING_LEVEL_WARNING, error.text, OCP_EP_NAME);
}

static void collect_trace(const profiler *p) {
  ocp_error error = {0};
  const ocp_python *python = p->traced ? ocp_python_call(&error) : NULL;
  if (!python)
    return;
  const int code = python->trace_collect(&error);
  ocp_python_returned();
  if (code != ORT_OK)
    ocp_log(ORT_LOGGING_LEVEL_ERROR, error.text, OCP_EP_NAME);
}

static void end_trace(profiler *p) {
  ocp_error error = {0};
  const ocp_python *python = p->traced ? ocp_python_call(&error) : NULL;
  p->traced = false;
  if (!python)
    return;
  python->trace_end();
  ocp_python_returned();
}

static void end(profiler *p) {
  end_trace(p);
  ocp_listener_close(p->listener);
  p->is_started = false;
  ocp_sources_sweep();
}

static void release(OrtEpProfilerImpl *impl) {
  profiler *p = self(impl);
  end(p);
  ocp_listener_destroy(p->listener);
  ocp_profile_names_free(&p->names);
  free(p->parents);
  pthread_mutex_destroy(&p->lock);
  free(p);
}

static OrtStatus *start_profiling(OrtEpProfilerImpl *impl, int64_t offset_ns) {
  profiler *p = self(impl);
  p->origin = ocp_activity_now() - offset_ns;
  ocp_listener_open(p->listener);
  if (!p->is_started)
    begin_trace(p);
  p->is_started = true;
  return NULL;
}

static OrtStatus *start_event(OrtEpProfilerImpl *impl, uint64_t key) {
  ocp_listener_enter(self(impl)->listener, key);
  return NULL;
}

/* Records the name of the event, which ORT tells only at its end. */
static void note(profiler *p, uint64_t event, const OrtProfilingEvent *ort_event) {
  const char *name = NULL, *op_type = NULL;
  OrtStatus *status = ocp_ep_api->ProfilingEvent_GetName(ort_event, &name);
  if (!status)
    status = ocp_ep_api->ProfilingEvent_GetArgValue(ort_event, "op_name", &op_type);
  if (status)
    ocp_api->ReleaseStatus(status);
  if (!name || p->num_parents == MAX_SEEN)
    return;
  if (p->num_parents == p->max_parents) {
    const size_t grown = p->max_parents ? 2 * p->max_parents : 256;
    ocp_profile_parent *parents = realloc(p->parents, grown * sizeof *parents);
    if (!parents)
      return;
    p->parents = parents;
    p->max_parents = grown;
  }
  p->parents[p->num_parents++] = (ocp_profile_parent){
      .event = event,
      .name = ocp_profile_name(&p->names, name),
      .op_type = op_type && *op_type ? ocp_profile_name(&p->names, op_type) : NULL,
  };
}

static OrtStatus *stop_event(OrtEpProfilerImpl *impl, uint64_t key, const OrtProfilingEvent *ort_event) {
  profiler *p = self(impl);
  const ocp_left_event left = ocp_listener_leave(p->listener, key);
  if (!left.event)
    return NULL;
  int64_t at = 0;
  OrtStatus *status = ocp_ep_api->ProfilingEvent_GetTimestampUs(ort_event, &at);
  pthread_mutex_lock(&p->lock);
  /* Estimates the origin from an event whose start ORT measured just before it called StartEvent. The origin is never
   * later than the estimate, so the least estimate is kept. An estimate is exact if the thread was not interrupted in
   * between. */
  if (!status && left.since - at * 1000 < p->origin)
    p->origin = left.since - at * 1000;
  note(p, left.event, ort_event);
  pthread_mutex_unlock(&p->lock);
  return status;
}

static OrtStatus *end_profiling(OrtEpProfilerImpl *impl, OrtProfilingEventsContainer *container) {
  profiler *p = self(impl);
  if (!p->is_started)
    return NULL;
  /* Waits, so that all enqueued work has become activities. On a lost device the wait fails, and the profile has the
   * activities up to then. */
  ocp_error ignored = {0};
  if (!atomic_load(&ocp_forked))
    ocp_device_synchronize(p->device, &ignored);
  collect_trace(p);
  ocp_profile profile = {.provider = p->provider, .emulated = p->device->emulated};
  profile.activities = ocp_listener_take(p->listener, &profile.num_activities, &profile.num_lost);
  pthread_mutex_lock(&p->lock);
  profile.origin = p->origin;
  profile.parents = p->parents;
  profile.num_parents = p->num_parents;
  OrtStatus *status = ocp_profile_write(&profile, container);
  p->num_parents = 0;
  pthread_mutex_unlock(&p->lock);
  free(profile.activities);
  end(p);
  return status;
}

OrtEpProfilerImpl *ocp_profiler_create(ocp_device *device, const char *provider, ocp_error *error) {
  profiler *p = calloc(1, sizeof *p);
  ocp_listener *listener = ocp_listener_create();
  if (!p || !listener) {
    ocp_listener_destroy(listener);
    free(p);
    ocp_fail_memory(error);
    return NULL;
  }
  p->device = device;
  p->listener = listener;
  p->provider = provider;
  pthread_mutex_init(&p->lock, NULL);
  p->ort = (OrtEpProfilerImpl){
      .ort_version_supported = ocp_api_version,
      .Release = release,
      .StartProfiling = start_profiling,
      .StartEvent = start_event,
      .StopEvent = stop_event,
      .EndProfiling = end_profiling,
  };
  return &p->ort;
}
