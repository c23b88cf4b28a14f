#include "emulator/work/stream_list.h"

#include <stdlib.h>

#include "emulator/clock.h"

struct CUstream_st *emu_streams;
static pthread_mutex_t list = PTHREAD_MUTEX_INITIALIZER; /* taken before all other locks */

void emu_note_error(emu_device *device, CUresult result) {
  int none = CUDA_SUCCESS;
  if (result == CUDA_ERROR_ILLEGAL_ADDRESS || result == CUDA_ERROR_LAUNCH_FAILED)
    atomic_compare_exchange_strong(&device->error, &none, result);
}

void emu_streams_lock(void) { pthread_mutex_lock(&list); }
void emu_streams_unlock(void) { pthread_mutex_unlock(&list); }

void emu_stream_free(CUstream stream) {
  if (stream->previous)
    stream->previous->next = stream->next;
  else
    emu_streams = stream->next;
  if (stream->next)
    stream->next->previous = stream->previous;
  pthread_mutex_destroy(&stream->lock);
  emu_clock_end(stream);
  free(stream->frontier);
  free(stream);
}

CUresult emu_enter_stream(CUstream *stream) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (!result)
    *stream = emu_stream_of(device, *stream);
  return result;
}
