/* Streams and events of the emulated device.
 *
 * Inline, an operation runs when it is enqueued, in the calling thread, under the stream's lock. Adversarial, it is
 * kept; when somebody waits, operations that stream order and events allow run one at a time, picked by a seeded
 * generator, until what is waited for is done. A program that forgets to wait then sees what it would see on a slow
 * GPU. */
#include "emu_stream.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_PENDING 4096u /* deferred operations; above, some run without anybody waiting */

/* Guards what events point to and, in adversarial mode, every queue. Taken after the lock of a stream. */
static pthread_mutex_t order = PTHREAD_MUTEX_INITIALIZER;
/* Guards the list of streams, together with `order`: who holds either may read it. Taken before all other locks. */
static pthread_mutex_t list = PTHREAD_MUTEX_INITIALIZER;
static struct CUstream_st *streams; /* made by StreamCreate, alive or still with work */
static uint64_t random_state;
static uint64_t sequence; /* of the next item */
static uint32_t pending;

typedef enum item_kind { ITEM_OP, ITEM_RECORD, ITEM_WAIT, ITEM_GRAPH } item_kind;
typedef struct emu_item {
  struct emu_item *next;
  item_kind kind;
  uint64_t sequence;
  emu_record *record;
  emu_replay *replay;
  emu_clock *clock;
  void *staged; /* contents of a pageable source */
  emu_op op;    /* as long as it needs */
} emu_item;

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec * 1e3 + (double)time.tv_nsec * 1e-6;
}

/* ---- records ---- */

static emu_record *make_record(void) {
  emu_record *record = calloc(1, sizeof *record);
  if (record)
    atomic_store_explicit(&record->references, 1, memory_order_relaxed);
  return record;
}

static void release_record(emu_record *record) {
  if (record && atomic_fetch_sub(&record->references, 1) == 1) {
    emu_clock_free(record->clock);
    free(record);
  }
}

static emu_record *share_record(emu_record *record) {
  if (record)
    atomic_fetch_add(&record->references, 1);
  return record;
}

static void finish_record(emu_record *record) {
  record->time = now();
  atomic_store_explicit(&record->done, true, memory_order_release);
}

static bool is_done(const emu_record *record) {
  return !record || atomic_load_explicit(&record->done, memory_order_acquire);
}

/* ---- the adversarial scheduler; all of it under `order` ---- */

uint32_t emu_random(uint32_t below) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return (uint32_t)((random_state >> 32) * below >> 32);
}

/* The null stream waits for earlier work of blocking streams, and they for its. */
static bool legacy_allows(const struct CUstream_st *stream) {
  const emu_device *device = stream->device;
  if (stream != &device->legacy) {
    const emu_item *first = device->legacy.head;
    return stream->flags & CU_STREAM_NON_BLOCKING || !first || first->sequence > stream->head->sequence;
  }
  for (const struct CUstream_st *other = streams; other; other = other->next)
    if (other->device == device && !(other->flags & CU_STREAM_NON_BLOCKING) && other->head &&
        other->head->sequence < stream->head->sequence)
      return false;
  return true;
}

static bool is_ready(const struct CUstream_st *stream) {
  const emu_item *item = stream->head;
  return item && (item->kind != ITEM_WAIT || is_done(item->record)) && legacy_allows(stream);
}

static void unlink_stream(struct CUstream_st *stream) {
  if (stream->previous)
    stream->previous->next = stream->next;
  else
    streams = stream->next;
  if (stream->next)
    stream->next->previous = stream->previous;
}

static void free_stream(struct CUstream_st *stream) {
  pthread_mutex_destroy(&stream->lock);
  emu_clock_end(stream);
  free(stream->frontier);
  free(stream);
}

static void note_error(emu_device *device, CUresult result) {
  int none = CUDA_SUCCESS;
  if (result == CUDA_ERROR_ILLEGAL_ADDRESS || result == CUDA_ERROR_LAUNCH_FAILED)
    atomic_compare_exchange_strong(&device->error, &none, result);
}

/* Runs the first item of a stream, or one node of it when it is a graph. After an error of the device nothing runs any
 * more, but everybody who waits is let go. */
static void run_first(struct CUstream_st *stream) {
  emu_item *item = stream->head;
  emu_device *device = stream->device;
  bool lost = atomic_load(&device->error) != CUDA_SUCCESS;
  if (item->kind == ITEM_GRAPH && !lost && emu_replay_step(item->replay, device, item->clock, emu_random))
    return;
  if (item->kind == ITEM_OP && !lost)
    note_error(device, emu_run(device, &item->op, item->clock));
  if (item->kind == ITEM_GRAPH) {
    note_error(device, emu_replay_result(item->replay));
    emu_replay_free(item->replay);
  }
  if (item->kind == ITEM_RECORD)
    finish_record(item->record);
  release_record(item->record);
  emu_clock_free(item->clock);
  free(item->staged);
  stream->head = item->next;
  if (!stream->head)
    stream->tail = NULL;
  free(item);
  pending--;
  if (stream->destroyed && !stream->head) {
    unlink_stream(stream);
    free_stream(stream);
  }
}

/* Runs something that may run, of any stream; false: there is nothing. */
static bool run_something(void) {
  uint32_t count = 0;
  struct CUstream_st *picked = NULL;
  for (struct CUstream_st *stream = streams; stream; stream = stream->next)
    if (is_ready(stream) && emu_random(++count) == 0)
      picked = stream;
  for (uint32_t index = 0; index < emu.config.num_devices; index++)
    if (is_ready(&emu.devices[index].legacy) && emu_random(++count) == 0)
      picked = &emu.devices[index].legacy;
  if (picked)
    run_first(picked);
  return picked != NULL;
}

static void drain(struct CUstream_st *stream) {
  while (stream->head && run_something()) {
  }
}

void emu_streams_reset(uint64_t seed) {
  pthread_mutex_lock(&order);
  random_state = seed * 0x9E3779B97F4A7C15u + 0x2545F4914F6CDD1Du;
  if (!random_state) /* a fixed point of the generator */
    random_state = 1;
  pthread_mutex_unlock(&order);
}

void emu_streams_drain(void) {
  pthread_mutex_lock(&order);
  while (run_something()) {
  }
  pthread_mutex_unlock(&order);
}

static void append(struct CUstream_st *stream, emu_item *item) {
  item->next = NULL;
  item->sequence = sequence++;
  if (stream->tail)
    stream->tail->next = item;
  else
    stream->head = item;
  stream->tail = item;
  for (pending++; pending > MAX_PENDING && run_something();) {
  }
}

static CUresult defer_op(struct CUstream_st *stream, const emu_op *op) {
  emu_item *item = calloc(1, offsetof(emu_item, op) + emu_op_bytes(op));
  if (!item)
    return CUDA_ERROR_OUT_OF_MEMORY;
  item->kind = ITEM_OP;
  memcpy(&item->op, op, emu_op_bytes(op));
  item->clock = emu_clock_tick(stream);
  bool waits = false;
  if (op->kind == EMU_OP_COPY && op->copy.src_host && emu_is_pageable((void *)op->copy.src, op->copy.bytes)) {
    item->staged = malloc(op->copy.bytes);
    if (!item->staged) {
      free(item);
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    memcpy(item->staged, (void *)op->copy.src, op->copy.bytes);
    item->op.copy.src = (uint64_t)item->staged;
  } else if (op->kind == EMU_OP_COPY && op->copy.dst_host) {
    waits = emu_is_pageable((void *)op->copy.dst, op->copy.bytes);
  }
  append(stream, item);
  if (waits) {
    drain(stream);
    emu_clock_host_waits(stream->clock);
  }
  return atomic_load(&stream->device->error);
}

CUresult emu_enqueue(CUstream stream, const emu_op *op) {
  CUresult result;
  if (emu.config.adversarial) {
    pthread_mutex_lock(&order);
    result = emu_is_capturing(stream, &result) ? emu_capture_op(stream, op) : result ? result : defer_op(stream, op);
    pthread_mutex_unlock(&order);
    return result;
  }
  pthread_mutex_lock(&stream->lock);
  if (emu_is_capturing(stream, &result)) {
    result = emu_capture_op(stream, op);
  } else if (!result) {
    emu_clock *clock = emu_clock_tick(stream);
    result = emu_run(stream->device, op, clock);
    note_error(stream->device, result);
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
    emu_item *item = calloc(1, sizeof *item);
    if (!item) {
      emu_replay_free(replay);
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    item->kind = ITEM_GRAPH;
    item->replay = replay;
    pthread_mutex_lock(&order);
    item->clock = emu_clock_tick(stream);
    append(stream, item);
    pthread_mutex_unlock(&order);
    return atomic_load(&stream->device->error);
  }
  pthread_mutex_lock(&stream->lock);
  emu_clock *clock = emu_clock_tick(stream);
  while (emu_replay_step(replay, stream->device, clock, NULL)) {
  }
  result = emu_replay_result(replay);
  note_error(stream->device, result);
  emu_clock_free(clock);
  pthread_mutex_unlock(&stream->lock);
  emu_replay_free(replay);
  return result;
}

/* ---- streams ---- */

void emu_streams_lock(void) { pthread_mutex_lock(&list); }
void emu_streams_unlock(void) { pthread_mutex_unlock(&list); }

void emu_streams_leave(const struct emu_capture *capture) {
  for (struct CUstream_st *stream = streams; stream; stream = stream->next)
    emu_capture_leave_stream(stream, capture);
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
  pthread_mutex_lock(&order);
  made->next = streams;
  if (streams)
    streams->previous = made;
  streams = made;
  pthread_mutex_unlock(&order);
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
  pthread_mutex_lock(&order);
  if (stream->head) {
    stream->destroyed = true;
  } else {
    unlink_stream(stream);
    free_stream(stream);
  }
  pthread_mutex_unlock(&order);
  pthread_mutex_unlock(&list);
  atomic_fetch_sub(&emu.live, 1);
  return emu_lost();
}

static CUresult enter_stream(CUstream *stream) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (!result && !*stream)
    *stream = &device->legacy;
  return result;
}

CUresult emu_stream_synchronize(CUstream stream) {
  CUresult result = enter_stream(&stream);
  if (result || (result = emu_capture_forbids(stream)))
    return result;
  if (emu.config.adversarial) {
    pthread_mutex_lock(&order);
    drain(stream);
    emu_clock_host_waits(stream->clock);
    pthread_mutex_unlock(&order);
  } else {
    pthread_mutex_lock(&stream->lock);
    emu_clock_host_waits(stream->clock);
    pthread_mutex_unlock(&stream->lock);
  }
  return atomic_load(&stream->device->error);
}

CUresult emu_stream_query(CUstream stream) {
  CUresult result = enter_stream(&stream);
  if (result || (result = emu_capture_forbids(stream)))
    return result;
  if (emu.config.adversarial) {
    pthread_mutex_lock(&order);
    if (stream->head && emu_random(2)) /* who polls gets on, too */
      run_something();
    result = stream->head ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
    if (!result)
      emu_clock_host_waits(stream->clock);
    pthread_mutex_unlock(&order);
  } else if (pthread_mutex_trylock(&stream->lock)) {
    result = CUDA_ERROR_NOT_READY;
  } else {
    emu_clock_host_waits(stream->clock);
    pthread_mutex_unlock(&stream->lock);
  }
  return result ? result : atomic_load(&stream->device->error);
}

static bool has_work(const emu_device *device) {
  for (const struct CUstream_st *stream = streams; stream; stream = stream->next)
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
    pthread_mutex_lock(&order);
    while (has_work(device) && run_something()) {
    }
    pthread_mutex_unlock(&order);
  }
  for (struct CUstream_st *stream = &device->legacy; stream;
       stream = stream == &device->legacy ? streams : stream->next)
    if (stream->device == device) {
      pthread_mutex_lock(&stream->lock);
      emu_clock_host_waits(stream->clock);
      pthread_mutex_unlock(&stream->lock);
    }
  pthread_mutex_unlock(&list);
  return atomic_load(&device->error);
}

/* ---- events ---- */

CUresult emu_event_create(CUevent *event, unsigned flags) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (result)
    return result;
  if (!event || flags > 7)
    return CUDA_ERROR_INVALID_VALUE;
  *event = calloc(1, sizeof **event);
  if (!*event)
    return CUDA_ERROR_OUT_OF_MEMORY;
  (*event)->flags = flags;
  atomic_fetch_add(&emu.live, 1);
  return CUDA_SUCCESS;
}

static void replace_record(CUevent event, emu_record *record) {
  release_record(event->record);
  event->record = record;
  emu_capture_forget(event);
}

CUresult emu_event_destroy(CUevent event) {
  CUresult result = emu_leave();
  if (result)
    return result;
  if (!event)
    return CUDA_ERROR_INVALID_HANDLE;
  pthread_mutex_lock(&order);
  replace_record(event, NULL);
  pthread_mutex_unlock(&order);
  free(event);
  atomic_fetch_sub(&emu.live, 1);
  return emu_lost();
}

CUresult emu_event_record(CUevent event, CUstream stream) {
  CUresult result = enter_stream(&stream);
  if (result)
    return result;
  if (!event)
    return CUDA_ERROR_INVALID_HANDLE;
  emu_record *record = make_record();
  emu_item *item = emu.config.adversarial ? calloc(1, sizeof *item) : NULL;
  if (!record || (emu.config.adversarial && !item)) {
    free(record);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  pthread_mutex_lock(&stream->lock);
  pthread_mutex_lock(&order);
  if (emu_is_capturing(stream, &result)) {
    replace_record(event, NULL);
    result = emu_capture_record(stream, event);
  } else if (!result) {
    record->clock = emu_clock_snapshot(stream);
    replace_record(event, record);
    if (item) {
      item->kind = ITEM_RECORD;
      item->record = share_record(record);
      append(stream, item);
      item = NULL;
    } else {
      finish_record(record);
    }
    record = NULL;
  }
  pthread_mutex_unlock(&order);
  pthread_mutex_unlock(&stream->lock);
  release_record(record);
  free(item);
  return result;
}

CUresult emu_stream_wait_event(CUstream stream, CUevent event, unsigned flags) {
  CUresult result = enter_stream(&stream);
  if (result)
    return result;
  if (!event || flags > 1)
    return event ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
  pthread_mutex_lock(&stream->lock);
  pthread_mutex_lock(&order);
  if (!emu_capture_wait(stream, event, &result) && event->record) {
    emu_clock_join(stream, event->record->clock);
    if (emu.config.adversarial && !is_done(event->record)) {
      emu_item *item = calloc(1, sizeof *item);
      if (item) {
        item->kind = ITEM_WAIT;
        item->record = share_record(event->record);
        append(stream, item);
      } else {
        result = CUDA_ERROR_OUT_OF_MEMORY;
      }
    }
  }
  pthread_mutex_unlock(&order);
  pthread_mutex_unlock(&stream->lock);
  return result;
}

CUresult emu_event_synchronize(CUevent event) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (result)
    return result;
  if (!event)
    return CUDA_ERROR_INVALID_HANDLE;
  result = emu_capture_event(event);
  if (result)
    return result;
  pthread_mutex_lock(&order);
  emu_record *record = share_record(event->record);
  while (!is_done(record) && run_something()) {
  }
  if (record)
    emu_clock_host_waits(record->clock);
  release_record(record);
  pthread_mutex_unlock(&order);
  return result ? result : atomic_load(&device->error);
}

CUresult emu_event_query(CUevent event) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (result)
    return result;
  if (!event)
    return CUDA_ERROR_INVALID_HANDLE;
  result = emu_capture_event(event);
  if (result)
    return result;
  pthread_mutex_lock(&order);
  if (!is_done(event->record) && emu_random(2)) /* who polls gets on, too */
    run_something();
  result = is_done(event->record) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
  if (!result && event->record)
    emu_clock_host_waits(event->record->clock);
  pthread_mutex_unlock(&order);
  return result ? result : atomic_load(&device->error);
}

CUresult emu_event_elapsed_time(float *milliseconds, CUevent start, CUevent end) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (result)
    return result;
  if (!milliseconds)
    return CUDA_ERROR_INVALID_VALUE;
  if (!start || !end || (start->flags | end->flags) & CU_EVENT_DISABLE_TIMING)
    return CUDA_ERROR_INVALID_HANDLE;
  pthread_mutex_lock(&order);
  if (!start->record || !end->record)
    result = CUDA_ERROR_INVALID_HANDLE;
  else if (!is_done(start->record) || !is_done(end->record))
    result = CUDA_ERROR_NOT_READY;
  else
    *milliseconds = (float)(end->record->time - start->record->time);
  pthread_mutex_unlock(&order);
  return result;
}
