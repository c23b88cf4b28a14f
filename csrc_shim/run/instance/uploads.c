#include "run/instance/uploads.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/device.h"
#include "device/release.h"

/* The events of a copy stream. cuStreamWaitEvent refers to the latest recording of its event, so an event can be
 * recorded again as soon as the wait for it is enqueued. */
typedef struct ocp_upload_events {
  ocp_device *device;
  CUevent ready;  /* recorded on the Run's stream before an upload */
  uint32_t count; /* number of `done` events */
  CUevent done[]; /* done[i % count]: recorded after upload i */
} ocp_upload_events;

static void release_events(void *state) {
  ocp_upload_events *events = state;
  ocp_device *device = events->device;
  OCP_STAY stay = ocp_device_enter_to_release(device);
  if (stay.entered) {
    if (events->ready)
      ocp_device_released(device, device->driver->EventDestroy(events->ready), "cuEventDestroy");
    for (uint32_t i = 0; i < events->count && events->done[i]; i++)
      ocp_device_released(device, device->driver->EventDestroy(events->done[i]), "cuEventDestroy");
  }
  free(events);
}

/* Gives the copy stream at least `count` `done` events. *events: all events of the stream. */
static int find_events(ocp_stream *copies, uint32_t count, ocp_upload_events **events, ocp_error *error) {
  ocp_device *device = copies->device;
  ocp_stream_slot *slot = &copies->slots[OCP_SLOT_UPLOAD_EVENTS];
  ocp_upload_events *old = atomic_load(&slot->state);
  *events = old;
  if (old && old->count >= count)
    return ORT_OK;
  ocp_upload_events *made = calloc(1, sizeof *made + count * sizeof *made->done);
  if (!made)
    return ocp_fail_memory(error);
  made->device = device;
  made->count = count;
  CUresult result = device->driver->EventCreate(&made->ready, CU_EVENT_DISABLE_TIMING);
  for (uint32_t i = 0; i < count && result == CUDA_SUCCESS; i++)
    result = device->driver->EventCreate(&made->done[i], CU_EVENT_DISABLE_TIMING);
  if (result != CUDA_SUCCESS) {
    release_events(made);
    return ocp_device_fail(device, result, "cuEventCreate", error);
  }
  slot->release = release_events;
  atomic_store(&slot->state, made);
  *events = made;
  if (old)
    release_events(old);
  return ORT_OK;
}

/* The copy stream that belongs to a Run's stream. */
typedef struct lane {
  ocp_stream *copies;
  atomic_bool in_use; /* set while a Run enqueues its uploads */
} lane;

static void release_lane(void *state) {
  ocp_stream_release(((lane *)state)->copies);
  free(state);
}

/* Returns the copy stream of a Run's stream; NULL with the error. The first call creates it. It lives as long as the
 * Run's stream. */
static lane *find_lane(ocp_stream *run, ocp_error *error) {
  ocp_stream_slot *slot = &run->slots[OCP_SLOT_UPLOADS];
  void *found = atomic_load(&slot->state);
  if (found)
    return found;
  lane *made = calloc(1, sizeof *made);
  if (!made) {
    ocp_fail_memory(error);
    return NULL;
  }
  if (ocp_stream_create(run->device, &made->copies, error) != ORT_OK) {
    free(made);
    return NULL;
  }
  slot->release = release_lane;
  if (atomic_compare_exchange_strong(&slot->state, &found, made))
    return made;
  release_lane(made); /* another thread that enqueues on the Run's stream was faster */
  return found;
}

static int begin(ocp_uploads *uploads, ocp_error *error) {
  lane *own = find_lane(uploads->run, error);
  if (!own)
    return error->code;
  if (!atomic_exchange(&own->in_use, true)) {
    uploads->copies = own->copies;
    uploads->in_use = &own->in_use;
  } else if (ocp_stream_borrow(uploads->run->device, &uploads->copies, error) != ORT_OK) {
    uploads->copies = NULL;
    return error->code;
  }
  return find_events(uploads->copies, uploads->most_in_flight, &uploads->events, error);
}

int ocp_uploads_copy(ocp_uploads *uploads, CUdeviceptr to, uint64_t from, size_t bytes, ocp_error *error) {
  if (!uploads->events && begin(uploads, error) != ORT_OK)
    return error->code;
  ocp_device *device = uploads->run->device;
  const ocp_driver *driver = device->driver;
  const CUstream copies = uploads->copies->handle;
  const void *source;
  memcpy(&source, &from, sizeof source);
  const char *call = NULL;
  CUresult result = CUDA_SUCCESS;
  if (!uploads->is_level) {
    call = "cuEventRecord";
    result = driver->EventRecord(uploads->events->ready, uploads->run->handle);
    if (result == CUDA_SUCCESS) {
      call = "cuStreamWaitEvent";
      result = driver->StreamWaitEvent(copies, uploads->events->ready, 0);
    }
    uploads->is_level = result == CUDA_SUCCESS;
  }
  if (result == CUDA_SUCCESS) {
    call = "cuMemcpyHtoDAsync";
    result = driver->MemcpyHtoDAsync(to, source, bytes, copies);
  }
  if (result == CUDA_SUCCESS) {
    /* The upload counts as issued even if its event cannot be recorded, so that ocp_uploads_end waits for it. */
    call = "cuEventRecord";
    result = driver->EventRecord(uploads->events->done[uploads->issued++ % uploads->events->count], copies);
  }
  if (result == CUDA_SUCCESS)
    return ORT_OK;
  char what[64];
  snprintf(what, sizeof what, "uploading a weight: %s", call);
  return ocp_device_fail(device, result, what, error);
}

CUresult ocp_uploads_await(ocp_uploads *uploads) {
  const CUevent done = uploads->events->done[uploads->awaited % uploads->events->count];
  const CUresult result = uploads->run->device->driver->StreamWaitEvent(uploads->run->handle, done, 0);
  uploads->awaited += result == CUDA_SUCCESS;
  return result;
}

/* Makes the Run's stream wait for all uploads. If that fails, the host waits: the memory that the uploads write is
 * about to be freed. */
static void join(ocp_uploads *uploads) {
  const ocp_driver *driver = uploads->run->device->driver;
  CUresult result = driver->EventRecord(uploads->events->ready, uploads->copies->handle);
  if (result == CUDA_SUCCESS)
    result = driver->StreamWaitEvent(uploads->run->handle, uploads->events->ready, 0);
  if (result == CUDA_SUCCESS)
    return;
  ocp_error ignored;
  ocp_stream_wait(uploads->copies, &ignored); /* the caller reports an earlier error */
}

void ocp_uploads_end(ocp_uploads *uploads) {
  if (uploads->issued != uploads->awaited)
    join(uploads);
  if (uploads->in_use)
    atomic_store(uploads->in_use, false);
  else if (uploads->copies)
    ocp_stream_return(uploads->copies);
}
