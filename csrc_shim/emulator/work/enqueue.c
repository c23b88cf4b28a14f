/* Enqueues operations. In inline mode an operation runs when it is enqueued, in the calling thread, under the stream's
 * lock, unless earlier work of the stream is queued behind a wait for an external semaphore; in adversarial mode, and
 * behind such work, it goes to the stream's queue (queue.c). */
#include "emulator/work/enqueue.h"

#include "emulator/clock.h"
#include "emulator/work/capture.h"
#include "emulator/work/execute.h"
#include "emulator/work/observe.h"
#include "emulator/work/queue.h"
#include "emulator/work/stream_list.h"

/* Inline mode: queues the operation if earlier work of the stream is queued, and returns whether it did so. The caller
 * holds the stream's lock. */
static bool is_queued_behind(CUstream stream, const emu_op *op, CUresult *result) {
  if (emu_queue_is_empty())
    return false;
  pthread_mutex_lock(&emu_order);
  const bool blocks = emu_queue_blocks(stream);
  if (blocks)
    *result = emu_queue_op(stream, op);
  pthread_mutex_unlock(&emu_order);
  return blocks;
}

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
  } else if (!result && !is_queued_behind(stream, op, &result)) {
    emu_clock *clock = emu.config.check ? emu_clock_tick(stream) : NULL;
    emu_context context = emu_context_of(stream);
    context.is_inline = true;
    context.deferred = false;
    result = emu_run_observed(&context, op, clock);
    if (result)
      emu_note_error(stream->device, result);
    if (op->kind == EMU_OP_COPY && op->copy.dst_host && clock && emu_is_pageable((void *)op->copy.dst, op->copy.bytes))
      emu_clock_host_waits(clock);
    if (clock)
      emu_clock_free(clock);
  }
  pthread_mutex_unlock(&stream->lock);
  return result;
}

CUresult emu_enqueue_replay(CUstream stream, emu_replay *replay) {
  CUresult result = emu_capture_forbids(stream); /* the launch of a graph cannot be captured */
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
  pthread_mutex_lock(&emu_order);
  if (emu_queue_blocks(stream) || !emu_replay_begin_inline(replay)) {
    result = emu_queue_replay(stream, replay);
    pthread_mutex_unlock(&emu_order);
    pthread_mutex_unlock(&stream->lock);
    return result;
  }
  pthread_mutex_unlock(&emu_order);
  emu_clock *clock = emu_clock_tick(stream);
  result = emu_replay_run(replay, clock);
  emu_note_error(stream->device, result);
  emu_clock_free(clock);
  pthread_mutex_unlock(&stream->lock);
  emu_replay_free(replay);
  return result;
}
