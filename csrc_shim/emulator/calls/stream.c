/* Streams of the emulated driver (cuStreamCreate, cuStreamSynchronize, ...). */
#include "emulator/calls/stream.h"

#include <stdlib.h>

#include "emulator/clock.h"
#include "emulator/mempool.h"
#include "emulator/state.h"
#include "emulator/work/capture.h"
#include "emulator/work/queue.h"
#include "emulator/work/stream_list.h"

CUresult emu_stream_create(CUstream *stream, unsigned flags) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (result)
    return result;
  if (!stream || flags & ~(unsigned)CU_STREAM_NON_BLOCKING)
    return CUDA_ERROR_INVALID_VALUE;
  struct CUstream_st *made = calloc(1, sizeof *made);
  if (!made)
    return CUDA_ERROR_OUT_OF_MEMORY;
  made->device = device;
  made->flags = flags;
  pthread_mutex_init(&made->lock, NULL);
  emu_streams_lock();
  pthread_mutex_lock(&emu_order);
  emu_queue_sweep();
  made->next = emu_streams;
  if (emu_streams)
    emu_streams->previous = made;
  emu_streams = made;
  pthread_mutex_unlock(&emu_order);
  emu_streams_unlock();
  atomic_fetch_add(&emu.live, 1);
  *stream = made;
  return CUDA_SUCCESS;
}

/* Destroys a stream. Its unfinished work still runs later, as CUDA specifies. */
CUresult emu_stream_destroy(CUstream stream) {
  CUresult result = emu_leave();
  if (result)
    return result;
  if (!stream)
    return CUDA_ERROR_INVALID_HANDLE;
  emu_streams_lock();
  emu_capture_leave(stream);
  pthread_mutex_lock(&stream->lock); /* waits for an operation that runs inline */
  pthread_mutex_unlock(&stream->lock);
  pthread_mutex_lock(&emu_order);
  stream->destroyed = true;
  emu_queue_sweep();
  pthread_mutex_unlock(&emu_order);
  emu_streams_unlock();
  atomic_fetch_sub(&emu.live, 1);
  return emu_lost();
}

CUresult emu_stream_get_ctx(CUstream stream, CUcontext *context) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (result)
    return result;
  if (!context)
    return CUDA_ERROR_INVALID_VALUE;
  stream = emu_stream_of(device, stream);
  bool known = stream == &device->legacy;
  emu_streams_lock();
  for (const struct CUstream_st *other = emu_streams; other && !known; other = other->next)
    known = other == stream && !other->destroyed;
  *context = known ? stream->device : NULL;
  emu_streams_unlock();
  return known ? CUDA_SUCCESS : emu_fail(CUDA_ERROR_INVALID_HANDLE, "%p is not a stream", (void *)stream);
}

CUresult emu_stream_synchronize(CUstream stream) {
  CUresult result = emu_enter_stream(&stream);
  if (result || (result = emu_capture_forbids(stream)))
    return result;
  if (emu.config.adversarial || !emu_queue_is_empty()) {
    pthread_mutex_lock(&emu_order);
    emu_queue_drain(stream);
    emu_clock_host_waits(stream->clock);
    pthread_mutex_unlock(&emu_order);
  }
  if (!emu.config.adversarial) {
    pthread_mutex_lock(&stream->lock);
    emu_clock_host_waits(stream->clock);
    pthread_mutex_unlock(&stream->lock);
  }
  emu_mempools_synchronized(stream->device);
  return emu_error_of(stream->device);
}

/* Whether the stream has queued work. */
static bool is_queued(const struct CUstream_st *stream) {
  if (emu_queue_is_empty())
    return false;
  pthread_mutex_lock(&emu_order);
  const bool queued = stream->head != NULL;
  pthread_mutex_unlock(&emu_order);
  return queued;
}

CUresult emu_stream_query(CUstream stream) {
  CUresult result = emu_enter_stream(&stream);
  if (result || (result = emu_capture_forbids(stream)))
    return result;
  if (emu.config.adversarial) {
    pthread_mutex_lock(&emu_order);
    if (stream->head && emu_random(2)) /* polling makes deferred work run, at random */
      emu_queue_run();
    result = stream->head ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
    if (!result)
      emu_clock_host_waits(stream->clock);
    pthread_mutex_unlock(&emu_order);
  } else if (is_queued(stream) || pthread_mutex_trylock(&stream->lock)) {
    result = CUDA_ERROR_NOT_READY;
  } else {
    emu_clock_host_waits(stream->clock);
    pthread_mutex_unlock(&stream->lock);
  }
  return result ? result : emu_error_of(stream->device);
}

static bool has_work(const emu_device *device) {
  for (const struct CUstream_st *stream = emu_streams; stream; stream = stream->next)
    if (stream->device == device && stream->head)
      return true;
  return device->legacy.head != NULL;
}

CUresult emu_ctx_synchronize(void) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (result || (result = emu_capture_forbids(NULL)))
    return result;
  if (emu.config.adversarial || !emu_queue_is_empty()) {
    pthread_mutex_lock(&emu_order);
    while (has_work(device) && (emu_queue_run() || emu_queue_await())) {
    }
    pthread_mutex_unlock(&emu_order);
  }
  emu_streams_lock();
  for (struct CUstream_st *stream = &device->legacy; stream;
       stream = stream == &device->legacy ? emu_streams : stream->next)
    if (stream->device == device) {
      pthread_mutex_lock(&stream->lock);
      emu_clock_host_waits(stream->clock);
      pthread_mutex_unlock(&stream->lock);
    }
  emu_streams_unlock();
  emu_mempools_synchronized(device);
  return emu_error_of(device);
}
