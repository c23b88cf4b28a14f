#include "ort/data/recording.h"

#include <pthread.h>
#include <stdlib.h>

#include "device/memory/memory.h"
#include "device/run_memory.h"

/* A Run whose work the application has captured. */
typedef struct recording {
  struct recording *next;
  ocp_run_memory memory; /* freed by the Run, but in use by the application's graph */
} recording;

struct ocp_recordings {
  ocp_stream *stream;
  pthread_mutex_t lock;
  recording *all;
};

/* The Run that the calling thread records, and the session that it belongs to. */
static _Thread_local recording *current;
static _Thread_local ocp_recordings *owner;

ocp_recordings *ocp_recordings_create(ocp_stream *stream) {
  ocp_recordings *recordings = calloc(1, sizeof *recordings);
  if (!recordings)
    return NULL;
  recordings->stream = ocp_stream_share(stream);
  pthread_mutex_init(&recordings->lock, NULL);
  return recordings;
}

void ocp_recordings_destroy(ocp_recordings *recordings) {
  if (!recordings)
    return;
  ocp_recordings_run_end(recordings);
  for (recording *entry = recordings->all, *next; entry; entry = next) {
    next = entry->next;
    ocp_run_memory_release(&entry->memory);
    free(entry);
  }
  ocp_stream_release(recordings->stream);
  pthread_mutex_destroy(&recordings->lock);
  free(recordings);
}

static int begin(ocp_recordings *recordings, ocp_error *error) {
  ocp_stream *stream = recordings->stream;
  recording *entry = calloc(1, sizeof *entry);
  if (!entry)
    return ocp_fail_memory(error);
  ocp_stream_take_turn(stream, /*alone=*/true);
  if (ocp_run_memory_watch(&entry->memory, stream->device, /*captured=*/true, error) != ORT_OK) {
    ocp_stream_end_turn(stream);
    free(entry);
    return error->code;
  }
  entry->memory.foreign = true;
  atomic_store(&stream->capture_failed, false);
  atomic_store(&stream->capturing, true);
  pthread_mutex_lock(&recordings->lock);
  entry->next = recordings->all;
  recordings->all = entry;
  pthread_mutex_unlock(&recordings->lock);
  ocp_device_in_foreign_capture(true);
  current = entry;
  owner = recordings;
  return ORT_OK;
}

int ocp_recordings_run_start(ocp_recordings *recordings, ocp_error *error) {
  ocp_recordings_run_end(recordings); /* a Run that ONNX Runtime has never ended */
  OCP_STAY stay = ocp_device_enter(recordings->stream->device, error);
  if (!stay.entered)
    return error->code;
  return ocp_stream_is_captured(recordings->stream) ? begin(recordings, error) : ORT_OK;
}

void ocp_recordings_run_end(ocp_recordings *recordings) {
  if (!current || owner != recordings)
    return;
  ocp_run_memory_unwatch(&current->memory);
  ocp_run_memory_forget_held(&current->memory); /* outputs that the application owns */
  ocp_device_in_foreign_capture(false);
  current = NULL;
  owner = NULL;
  atomic_store(&recordings->stream->capturing, false);
  ocp_stream_end_turn(recordings->stream);
}
