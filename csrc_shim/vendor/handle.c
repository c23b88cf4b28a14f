#include "vendor/handle.h"

#include <stdlib.h>

static void close_handle(void *state) {
  ocp_library_handle *handle = state;
  handle->library->close(handle->handle);
  pthread_mutex_destroy(&handle->lock);
  free(handle);
}

static ocp_library_handle *open_handle(const ocp_stream *stream, const ocp_library *library, ocp_error *error) {
  ocp_library_handle *handle = calloc(1, sizeof *handle);
  if (!handle) {
    ocp_fail_memory(error);
    return NULL;
  }
  handle->library = library;
  handle->driver = stream->device->driver;
  handle->ordinal = stream->device->ordinal;
  if (library->open(&handle->handle, error) != ORT_OK) {
    error->code = ORT_FAIL; /* so that later sessions try the library again: then opening it may succeed */
    free(handle);
    return NULL;
  }
  pthread_mutex_init(&handle->lock, NULL);
  return handle;
}

ocp_library_handle *ocp_library_handle_take(ocp_stream *stream, const ocp_library *library, ocp_error *error) {
  static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
  ocp_stream_slot *slot = &stream->slots[library->slot];
  ocp_library_handle *handle = atomic_load_explicit(&slot->state, memory_order_acquire);
  if (!handle) {
    pthread_mutex_lock(&opening);
    handle = atomic_load_explicit(&slot->state, memory_order_acquire);
    if (!handle && (handle = open_handle(stream, library, error))) {
      slot->release = close_handle;
      atomic_store_explicit(&slot->state, handle, memory_order_release);
    }
    pthread_mutex_unlock(&opening);
  }
  if (handle)
    pthread_mutex_lock(&handle->lock);
  return handle;
}

void ocp_library_handle_give_back(ocp_library_handle *handle) { pthread_mutex_unlock(&handle->lock); }
