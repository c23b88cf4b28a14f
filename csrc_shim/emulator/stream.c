/* Streams of the emulated device. Inline, an operation runs when it is enqueued, in the calling thread, under the
 * stream's lock; in adversarial mode it goes to the stream's queue (queue.c). */
#include "emulator/stream.h"

#include <stdlib.h>

#include "emulator/driver.h"
#include "emulator/memory.h"
#include "emulator/mempool.h"
#include "emulator/observe.h"
#include "emulator/queue.h"

struct CUstream_st *emu_streams;
static pthread_mutex_t list = PTHREAD_MUTEX_INITIALIZER; /* taken before all other locks */

void emu_note_error(emu_device *device, CUresult result) {
  int none = CUDA_SUCCESS;
  if (result == CUDA_ERROR_ILLEGAL_ADDRESS || result == CUDA_ERROR_LAUNCH_FAILED)
    atomic_compare_exchange_strong(&device->error, &none, result);
}

/* ---- operations ---- */

CUresult emu_enqueue(CUstream stream, const emu_op *op) {
  CUresult result;
  if (emu.config.adversarial) {
    pthread_mutex_lock(&emu_order);
    if (emu_is_capturing(stream, &result))
      result = emu_capture_op(stream, op);
    else if (!result)
      result = emu_queue_op(stream, op);
    pthread_mutex_unlock(&emu_order);
    return result;
  }
  pthread_mutex_lock(&stream->lock);
  if (emu_is_capturing(stream, &result)) {
    result = emu_capture_op(stream, op);
  } else if (!result) {
    emu_clock *clock = emu_clock_tick(stream);
    emu_context context = emu_context_of(stream);
    context.is_inline = true;
    result = emu_run_observed(&context, op, clock);
    emu_note_error(stream->device, result);
    if (op->kind == EMU_OP_COPY && op->copy.dst_host && clock && emu_is_pageable((void *)op->copy.dst, op->copy.bytes))
      emu_clock_host_waits(clock);
    emu_clock_free(clock);
  }
  pthread_mutex_unlock(&stream->lock);
  return result;
}

CUresult emu_enqueue_replay(CUstream stream, emu_replay *replay) {
  CUresult result = emu_capture_forbids(stream); /* no graphs within graphs */
  if (result) {
    emu_replay_free(replay);
    return result;
  }
  if (emu.config.adversarial) {
    pthread_mutex_lock(&emu_order);
    result = emu_queue_replay(stream, replay);
    pthread_mutex_unlock(&emu_order);
    return result;
  }
  pthread_mutex_lock(&stream->lock);
  emu_clock *clock = emu_clock_tick(stream);
  result = emu_replay_run(replay, clock);
  emu_note_error(stream->device, result);
  emu_clock_free(clock);
  pthread_mutex_unlock(&stream->lock);
  emu_replay_free(replay);
  return result;
}

/* ---- streams ---- */

void emu_streams_lock(void) { pthread_mutex_lock(&list); }
void emu_streams_unlock(void) { pthread_mutex_unlock(&list); }

void emu_streams_leave(const struct emu_capture *capture) {
  for (struct CUstream_st *stream = emu_streams; stream; stream = stream->next)
    emu_capture_leave_stream(stream, capture);
}

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
  pthread_mutex_lock(&list);
  pthread_mutex_lock(&emu_order);
  made->next = emu_streams;
  if (emu_streams)
    emu_streams->previous = made;
  emu_streams = made;
  pthread_mutex_unlock(&emu_order);
  pthread_mutex_unlock(&list);
  atomic_fetch_add(&emu.live, 1);
  *stream = made;
  return CUDA_SUCCESS;
}

/* Work that the stream still has is done later, as CUDA says. */
CUresult emu_stream_destroy(CUstream stream) {
  CUresult result = emu_leave();
  if (result)
    return result;
  if (!stream)
    return CUDA_ERROR_INVALID_HANDLE;
  pthread_mutex_lock(&list);
  emu_capture_leave(stream);
  pthread_mutex_lock(&stream->lock); /* an operation that runs inline ends first */
  pthread_mutex_unlock(&stream->lock);
  pthread_mutex_lock(&emu_order);
  if (stream->head) {
    stream->destroyed = true;
  } else {
    emu_stream_free(stream);
  }
  pthread_mutex_unlock(&emu_order);
  pthread_mutex_unlock(&list);
  atomic_fetch_sub(&emu.live, 1);
  return emu_lost();
}

CUresult emu_enter_stream(CUstream *stream) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (!result)
    *stream = emu_stream_of(device, *stream);
  return result;
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
  pthread_mutex_lock(&list);
  for (const struct CUstream_st *other = emu_streams; other && !known; other = other->next)
    known = other == stream && !other->destroyed;
  *context = known ? stream->device : NULL;
  pthread_mutex_unlock(&list);
  return known ? CUDA_SUCCESS : emu_fail(CUDA_ERROR_INVALID_HANDLE, "%p is not a stream", (void *)stream);
}

CUresult emu_stream_synchronize(CUstream stream) {
  CUresult result = emu_enter_stream(&stream);
  if (result || (result = emu_capture_forbids(stream)))
    return result;
  if (emu.config.adversarial) {
    pthread_mutex_lock(&emu_order);
    emu_queue_drain(stream);
    emu_clock_host_waits(stream->clock);
    pthread_mutex_unlock(&emu_order);
  } else {
    pthread_mutex_lock(&stream->lock);
    emu_clock_host_waits(stream->clock);
    pthread_mutex_unlock(&stream->lock);
  }
  emu_mempools_synchronized(stream->device);
  return atomic_load(&stream->device->error);
}

CUresult emu_stream_query(CUstream stream) {
  CUresult result = emu_enter_stream(&stream);
  if (result || (result = emu_capture_forbids(stream)))
    return result;
  if (emu.config.adversarial) {
    pthread_mutex_lock(&emu_order);
    if (stream->head && emu_random(2)) /* a program that polls makes progress */
      emu_queue_run();
    result = stream->head ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
    if (!result)
      emu_clock_host_waits(stream->clock);
    pthread_mutex_unlock(&emu_order);
  } else if (pthread_mutex_trylock(&stream->lock)) {
    result = CUDA_ERROR_NOT_READY;
  } else {
    emu_clock_host_waits(stream->clock);
    pthread_mutex_unlock(&stream->lock);
  }
  return result ? result : atomic_load(&stream->device->error);
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
  pthread_mutex_lock(&list);
  if (emu.config.adversarial) {
    pthread_mutex_lock(&emu_order);
    while (has_work(device) && emu_queue_run()) {
    }
    pthread_mutex_unlock(&emu_order);
  }
  for (struct CUstream_st *stream = &device->legacy; stream;
       stream = stream == &device->legacy ? emu_streams : stream->next)
    if (stream->device == device) {
      pthread_mutex_lock(&stream->lock);
      emu_clock_host_waits(stream->clock);
      pthread_mutex_unlock(&stream->lock);
    }
  pthread_mutex_unlock(&list);
  emu_mempools_synchronized(device);
  return atomic_load(&device->error);
}
