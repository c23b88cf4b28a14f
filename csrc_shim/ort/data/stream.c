/* OrtSyncStreamImpl over ocp_stream, and OrtSyncNotificationImpl over events. */
#include "ort/data/stream.h"

#include <stdlib.h>

#include "base/host.h"
#include "base/process.h"
#include "device/memory/memory.h"
#include "device/open/devices.h"
#include "device/order.h"
#include "device/peers/peer_stream.h"
#include "device/pool.h"
#include "device/release.h"
#include "device/wait.h"
#include "driver/driver.h"
#include "ort/data/place.h"

/* ---- OrtSyncNotificationImpl ---- */

typedef struct notification {
  OrtSyncNotificationImpl ort;
  ocp_stream *producer;           /* with a reference: ORT may release the stream before the notification */
  uint64_t producer_id, position; /* the producer's id, and its sequence number when the event was recorded */
  CUevent event;
  bool activated;
} notification;

static void notification_release(OrtSyncNotificationImpl *this_ptr) {
  notification *self = (notification *)(void *)this_ptr;
  OCP_STAY stay = ocp_device_enter_to_release(self->producer->device);
  if (stay.entered)
    ocp_device_released(self->producer->device, self->producer->device->driver->EventDestroy(self->event),
                        "cuEventDestroy");
  ocp_stream_release(self->producer);
  free(self);
}

static OrtStatus *notification_activate(OrtSyncNotificationImpl *this_ptr) {
  notification *self = (notification *)(void *)this_ptr;
  ocp_device *device = self->producer->device;
  ocp_error error = {0};
  OCP_STAY stay = ocp_device_enter(device, &error);
  if (stay.entered) {
    self->position = ocp_stream_position(self->producer);
    CUresult result = device->driver->EventRecord(self->event, self->producer->handle);
    if (result != CUDA_SUCCESS)
      ocp_device_fail(device, result, "cuEventRecord", &error);
    self->activated = result == CUDA_SUCCESS;
  }
  return ocp_status(&error);
}

static int wait_on_host(notification *self, ocp_error *error) {
  ocp_device *device = self->producer->device;
  OCP_STAY stay = ocp_device_enter(device, error);
  if (!stay.entered)
    return error->code;
  CUresult result = device->driver->EventSynchronize(self->event);
  if (result != CUDA_SUCCESS)
    return ocp_device_fail(device, result, "cuEventSynchronize", error);
  if (self->activated)
    ocp_stream_completed(device, self->producer_id, self->position);
  return ORT_OK;
}

static OrtStatus *notification_wait_on_host(OrtSyncNotificationImpl *this_ptr) {
  ocp_error error = {0};
  wait_on_host((notification *)(void *)this_ptr, &error);
  return ocp_status(&error);
}

static OrtStatus *notification_wait_on_device(OrtSyncNotificationImpl *this_ptr, OrtSyncStream *consumer_stream) {
  notification *self = (notification *)(void *)this_ptr;
  ocp_device *device = self->producer->device;
  ocp_stream *consumer = ocp_ort_stream(consumer_stream);
  ocp_error error = {0};
  /* Streams of other EPs and drivers cannot wait for the plugin's events. */
  if (!consumer || consumer->device->driver != device->driver) {
    wait_on_host(self, &error);
    return ocp_status(&error);
  }
  OCP_STAY stay = ocp_device_enter(consumer->device, &error);
  if (stay.entered) {
    CUresult result = device->driver->StreamWaitEvent(consumer->handle, self->event, 0);
    if (result != CUDA_SUCCESS)
      ocp_device_fail(consumer->device, result, "cuStreamWaitEvent", &error);
    else if (self->activated && consumer->device == device)
      ocp_stream_waits(consumer, self->producer_id, self->position);
    ocp_stream_enqueued(consumer);
  }
  return ocp_status(&error);
}

/* ---- OrtSyncStreamImpl ---- */

/* ORT's view of a stream, in a slot of the stream: shared by all users of the stream; freed with the stream. */
typedef struct stream_view {
  OrtSyncStreamImpl ort; /* first member: ORT's view */
  ocp_stream *stream;
} stream_view;

static ocp_stream *stream_of(OrtSyncStreamImpl *this_ptr) { return ((stream_view *)(void *)this_ptr)->stream; }

static void stream_release(OrtSyncStreamImpl *this_ptr) { ocp_stream_release(stream_of(this_ptr)); }

static void *stream_get_handle(OrtSyncStreamImpl *this_ptr) { return stream_of(this_ptr)->handle; }

static OrtStatus *stream_create_notification(OrtSyncStreamImpl *this_ptr, OrtSyncNotificationImpl **out) {
  ocp_stream *stream = stream_of(this_ptr);
  ocp_error error = {0};
  *out = NULL;
  OCP_STAY stay = ocp_device_enter(stream->device, &error);
  if (!stay.entered)
    return ocp_status(&error);
  notification *self = calloc(1, sizeof *self);
  if (!self) {
    ocp_fail_memory(&error);
    return ocp_status(&error);
  }
  CUresult result = stream->device->driver->EventCreate(&self->event, CU_EVENT_DISABLE_TIMING);
  if (result != CUDA_SUCCESS) {
    free(self);
    ocp_device_fail(stream->device, result, "cuEventCreate", &error);
    return ocp_status(&error);
  }
  self->producer = ocp_stream_share(stream);
  self->producer_id = stream->priv->id;
  self->ort = (OrtSyncNotificationImpl){.ort_version_supported = ocp_api_version,
                                        .Release = notification_release,
                                        .Activate = notification_activate,
                                        .WaitOnDevice = notification_wait_on_device,
                                        .WaitOnHost = notification_wait_on_host};
  *out = &self->ort;
  return NULL;
}

/* Returns whether the application is capturing its own stream. Such a stream executes nothing, and waiting for it would
 * invalidate the capture. */
static bool is_recorded(const ocp_stream *stream) {
  ocp_error ignored;
  if (stream->owned)
    return false;
  OCP_STAY stay = ocp_device_enter(stream->device, &ignored);
  return stay.entered && ocp_stream_is_captured(stream);
}

static OrtStatus *stream_wait(OrtSyncStreamImpl *this_ptr) {
  ocp_stream *stream = stream_of(this_ptr);
  ocp_error error;
  const bool forked = atomic_load_explicit(&ocp_forked, memory_order_relaxed); /* ocp_stream_synchronize then fails */
  if (!forked && (ocp_stream_is_idle(stream) || !ocp_stream_try_turn(stream)))
    return NULL; /* idle, or in a capture, whose end waits for the work */
  int code = !forked && is_recorded(stream) ? ORT_OK : ocp_stream_synchronize(stream, &error);
  if (!forked)
    ocp_stream_end_turn(stream);
  if (code == ORT_OK && !forked)
    code = ocp_peer_synchronize(stream, &error); /* the work on other devices has finished, but may have failed */
  return code == ORT_OK ? NULL : ocp_status(&error);
}

/* ORT calls this at the end of a Run, and then Flush. The host waits here already, because an error of this function
 * reaches the user, while an error of Flush only reaches the log. */
static OrtStatus *stream_run_ends(OrtSyncStreamImpl *this_ptr) {
  OrtStatus *status = stream_wait(this_ptr);
  if (!status)
    ocp_pool_run_ended(stream_of(this_ptr)->device);
  return status;
}

static OrtSyncStreamImpl *make_view(ocp_stream *stream) {
  stream_view *view = calloc(1, sizeof *view);
  if (!view)
    return NULL;
  view->stream = stream;
  view->ort = (OrtSyncStreamImpl){.ort_version_supported = ocp_api_version,
                                  .Release = stream_release,
                                  .GetHandle = stream_get_handle,
                                  .CreateNotification = stream_create_notification,
                                  .Flush = stream_wait,
                                  .OnSessionRunEnd = stream_run_ends};
  return &view->ort;
}

OrtSyncStreamImpl *ocp_ort_stream_view(ocp_stream *stream, ocp_error *error) {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  ocp_stream_slot *slot = &stream->slots[OCP_SLOT_ORT];
  pthread_mutex_lock(&lock); /* several sessions may share the stream */
  if (!slot->state) {
    slot->release = free;
    slot->state = make_view(stream);
  }
  OrtSyncStreamImpl *view = slot->state;
  pthread_mutex_unlock(&lock);
  if (!view)
    ocp_fail_memory(error);
  return view;
}

bool ocp_ort_is_stream_aware(const OrtEpFactory *factory) {
  (void)factory;
  return true;
}

OrtStatus *ocp_ort_create_sync_stream(OrtEpFactory *factory, const OrtMemoryDevice *memory_device,
                                      const OrtKeyValuePairs *options, OrtSyncStreamImpl **out) {
  (void)factory;
  (void)options;
  *out = NULL;
  ocp_place where = ocp_ort_place(memory_device);
  if (where.kind != OCP_PLACE_DEVICE)
    return ocp_api->CreateStatus(ORT_INVALID_ARGUMENT,
                                 OCP_EP_NAME " cannot create a stream for this memory: expected device memory");
  ocp_error error = {0};
  ocp_stream *stream = NULL;
  ocp_device *device = ocp_device_open(where.emulated, where.ordinal, &error);
  if (device && ocp_stream_create(device, &stream, &error) == ORT_OK)
    *out = ocp_ort_stream_view(stream, &error);
  if (!*out)
    ocp_stream_release(stream);
  return ocp_status(&error);
}

OrtStatus *ocp_ort_synchronize_device(ocp_device *device) {
  ocp_error error = {0};
  ocp_device_synchronize(device, &error);
  return ocp_status(&error);
}

/* ---- from ORT's streams to the plugin's ---- */

/* Finds the ocp_stream by the handle of ORT's stream. ORT also passes streams that no plugin made: streams of built-in
 * EPs, and in older versions a stream for the block of a memory pattern. SyncStream_GetImpl reads past the end of these
 * objects. */
ocp_stream *ocp_ort_stream(OrtSyncStream *stream) {
  void *handle = stream ? ocp_api->SyncStream_GetHandle(stream) : NULL;
  if (!handle)
    return NULL;
  if (handle == (void *)CU_STREAM_LEGACY || handle == (void *)CU_STREAM_PER_THREAD) /* equal on every device */
    return ocp_stream_of_state(OCP_SLOT_ORT, ocp_ep_api->SyncStream_GetImpl(stream));
  return ocp_stream_of_handle(NULL, handle);
}

int ocp_ort_stream_of_context(const OrtKernelContext *context, const ocp_device *device, ocp_stream **out,
                              ocp_error *error) {
  void *handle = NULL;
  OrtStatus *status = ocp_api->KernelContext_GetGPUComputeStream(context, &handle);
  *out = handle ? ocp_stream_of_handle(device, handle) : NULL;
  return status ? ocp_fail_status(error, status) : ORT_OK;
}

int ocp_ort_begin_work(ocp_work *work, ocp_device *device, ocp_error *error) {
  work->borrowed = !work->stream;
  if (work->borrowed && ocp_device_settle(device, error) == ORT_OK)
    ocp_stream_borrow(device, &work->stream, error);
  return work->stream ? ORT_OK : error->code;
}

void ocp_ort_end_work(const ocp_work *work, ocp_error *error) {
  if (!work->borrowed)
    return;
  ocp_error late = {0};
  if (ocp_stream_synchronize(work->stream, &late) != ORT_OK && error->code == ORT_OK)
    *error = late;
  ocp_stream_return(work->stream);
}
