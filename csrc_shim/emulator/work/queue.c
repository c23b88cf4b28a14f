/* The queues of deferred work of streams and graphs. When the program waits, operations run one at a time until the
 * awaited work is done. A seeded random generator picks each operation from those that stream order, events and
 * external semaphores allow. So in adversarial mode, which queues everything, a program that forgets to wait reads the
 * stale data that it could read on a slow GPU. The functions run with emu_order held. */
#include "emulator/work/queue.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "emulator/clock.h"
#include "emulator/work/execute.h"
#include "emulator/work/observe.h"
#include "emulator/work/stream_list.h"

/* Maximum number of deferred operations. Above it, some run although the program does not wait. */
#define MAX_PENDING 4096u

pthread_mutex_t emu_order = PTHREAD_MUTEX_INITIALIZER;

static uint64_t random_state;
static uint64_t sequence; /* number of the next item */
static atomic_uint pending;
static uint32_t num_external; /* queued ITEM_EXTERNAL_WAIT and ITEM_SIGNAL */

/* Checking mode. `clock`: the operations that the host had waited for when a stream last ran an external wait or
 * signal. `sequence`: number of the first item that was queued after that. Whoever sees a signal may signal in turn,
 * and the clocks do not show this order. So an item that was queued earlier, but runs later, counts as ordered after
 * the operations in `clock`. */
static struct {
  emu_clock *clock;
  uint64_t sequence;
} last_external;

/* Pauses between two looks at the external semaphores for which streams wait. */
enum { POLL_NANOSECONDS = 200000 };

typedef enum item_kind { ITEM_OP, ITEM_RECORD, ITEM_WAIT, ITEM_GRAPH, ITEM_EXTERNAL_WAIT, ITEM_SIGNAL } item_kind;
typedef struct emu_item {
  struct emu_item *next;
  item_kind kind;
  uint64_t sequence;
  emu_record *record;
  emu_replay *replay;
  emu_timeline *timeline; /* of an external wait or signal */
  uint64_t value;         /* the value to wait for or to set */
  double since;           /* seconds; when an external wait was first seen to keep its stream waiting; 0: not yet */
  emu_clock *clock;
  emu_context context;
  void *staged; /* contents of the pageable source of a copy, saved when the copy was enqueued */
  emu_op op;    /* with its parameters behind it: emu_op_bytes */
} emu_item;

uint32_t emu_random(uint32_t below) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return (uint32_t)((random_state >> 32) * below >> 32);
}

/* Whether the order between the null stream and blocking streams lets the first item of `stream` run: the null stream
 * waits for earlier work of all blocking streams, and each of these waits for earlier work of the null stream. */
static bool legacy_allows(const struct CUstream_st *stream) {
  const emu_device *device = stream->device;
  if (stream != &device->legacy) {
    const emu_item *first = device->legacy.head;
    return stream->flags & CU_STREAM_NON_BLOCKING || !first || first->sequence > stream->head->sequence;
  }
  for (const struct CUstream_st *other = emu_streams; other; other = other->next)
    if (other->device == device && !(other->flags & CU_STREAM_NON_BLOCKING) && other->head &&
        other->head->sequence < stream->head->sequence)
      return false;
  return true;
}

/* Whether the first item of the stream is a wait for an external semaphore that has not reached the awaited value. The
 * waits of a lost device end at once. */
static bool waits_for_semaphore(const struct CUstream_st *stream) {
  const emu_item *item = stream->head;
  return item && item->kind == ITEM_EXTERNAL_WAIT && emu_timeline_value(item->timeline) < item->value &&
         atomic_load(&stream->device->error) == CUDA_SUCCESS;
}

/* Whether the first item of the stream waits for something that no queue has: a semaphore, or a launch that another
 * thread runs inline. */
static bool waits_outside(const struct CUstream_st *stream) {
  const emu_item *item = stream->head;
  return waits_for_semaphore(stream) || (item && item->kind == ITEM_GRAPH && emu_replay_is_inline(item->replay));
}

static bool is_ready(const struct CUstream_st *stream) {
  const emu_item *item = stream->head;
  return item && (item->kind != ITEM_WAIT || emu_record_is_done(item->record)) &&
         (item->kind != ITEM_GRAPH || emu_replay_is_next(item->replay)) && !waits_outside(stream) &&
         legacy_allows(stream);
}

/* Runs the first item of a stream, or the next node if the item is a graph. After a sticky error it only removes the
 * item, and frees the memory of an EMU_OP_FREE, so that every wait ends. */
static void run_first(struct CUstream_st *stream) {
  emu_item *item = stream->head;
  emu_device *device = stream->device;
  bool lost = atomic_load(&device->error) != CUDA_SUCCESS;
  if (item->sequence < last_external.sequence)
    emu_clock_follow(&item->clock, last_external.clock);
  if (item->kind == ITEM_GRAPH && !lost && emu_replay_step(item->replay, item->clock, emu_random))
    return;
  if (item->kind == ITEM_OP && (!lost || item->op.kind == EMU_OP_FREE))
    emu_note_error(device, emu_run_observed(&item->context, &item->op, item->clock));
  if (item->kind == ITEM_GRAPH) {
    emu_note_error(device, emu_replay_result(item->replay));
    emu_replay_free(item->replay);
  }
  if (item->kind == ITEM_RECORD)
    emu_record_finish(item->record);
  if (item->kind == ITEM_SIGNAL && !lost) {
    emu_clock_host_waits(item->clock); /* the host may see the value */
    emu_timeline_signal(item->timeline, item->value);
  }
  if (item->timeline) {
    num_external--;
    emu_clock_free(last_external.clock);
    last_external.clock = emu_clock_of_host();
    last_external.sequence = sequence;
  }
  emu_timeline_release(item->timeline);
  emu_record_release(item->record);
  emu_clock_free(item->clock);
  free(item->staged);
  stream->head = item->next;
  if (!stream->head)
    stream->tail = NULL;
  free(item);
  atomic_fetch_sub(&pending, 1);
}

bool emu_queue_run(void) {
  uint32_t count = 0;
  struct CUstream_st *picked = NULL;
  for (struct CUstream_st *stream = emu_streams; stream; stream = stream->next)
    if (is_ready(stream) && emu_random(++count) == 0)
      picked = stream;
  for (uint32_t index = 0; index < emu.config.num_devices; index++)
    if (is_ready(&emu.devices[index].legacy) && emu_random(++count) == 0)
      picked = &emu.devices[index].legacy;
  if (picked)
    run_first(picked);
  return picked != NULL;
}

/* Loses the stream's device if the stream's external wait has lasted too long. Returns waits_outside(stream). */
static bool check_patience(struct CUstream_st *stream) {
  emu_item *item = stream->head;
  if (!waits_for_semaphore(stream))
    return waits_outside(stream);
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  const double now = (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
  const uint32_t patience = emu_semaphore_seconds();
  if (item->since == 0)
    item->since = now;
  if (now - item->since < patience)
    return true;
  emu_lose_device(stream->device, CUDA_ERROR_LAUNCH_TIMEOUT,
                  "a stream waits for value %llu of a %s, whose value is still %llu after %u seconds. "
                  "Signal it, or set " EMU_SEMAPHORE_VARIABLE " to more seconds",
                  (unsigned long long)item->value, emu_timeline_name(item->timeline),
                  (unsigned long long)emu_timeline_value(item->timeline), patience);
  return true;
}

bool emu_queue_await(void) {
  bool waits = false;
  for (struct CUstream_st *stream = emu_streams; stream; stream = stream->next)
    waits |= check_patience(stream);
  for (uint32_t index = 0; index < emu.config.num_devices; index++)
    waits |= check_patience(&emu.devices[index].legacy);
  if (!waits)
    return false;
  pthread_mutex_unlock(&emu_order);
  nanosleep(&(struct timespec){.tv_nsec = POLL_NANOSECONDS}, NULL);
  pthread_mutex_lock(&emu_order);
  return true;
}

void emu_queue_drain(struct CUstream_st *stream) {
  while (stream->head && (emu_queue_run() || emu_queue_await())) {
  }
}

bool emu_queue_is_empty(void) { return atomic_load(&pending) == 0; }

bool emu_queue_blocks(CUstream stream) {
  const emu_device *device = stream->device;
  if (stream->head)
    return true;
  if (stream != &device->legacy)
    return !(stream->flags & CU_STREAM_NON_BLOCKING) && device->legacy.head;
  for (const struct CUstream_st *other = emu_streams; other; other = other->next)
    if (other->device == device && !(other->flags & CU_STREAM_NON_BLOCKING) && other->head)
      return true;
  return false;
}

uint32_t emu_queue_external(void) { return num_external; }

void emu_queue_sweep(void) {
  for (struct CUstream_st *stream = emu_streams, *next; stream; stream = next) {
    next = stream->next;
    if (stream->destroyed && !stream->head)
      emu_stream_free(stream);
  }
}

void emu_queue_seed(uint64_t seed) {
  pthread_mutex_lock(&emu_order);
  random_state = seed * 0x9E3779B97F4A7C15u + 0x2545F4914F6CDD1Du;
  if (!random_state) /* zero is a fixed point of the generator */
    random_state = 1;
  pthread_mutex_unlock(&emu_order);
}

void emu_queue_run_all(void) {
  pthread_mutex_lock(&emu_order);
  while (emu_queue_run()) {
  }
  pthread_mutex_unlock(&emu_order);
}

static void append(struct CUstream_st *stream, emu_item *item) {
  item->next = NULL;
  item->sequence = sequence++;
  if (stream->tail)
    stream->tail->next = item;
  else
    stream->head = item;
  stream->tail = item;
  for (atomic_fetch_add(&pending, 1); atomic_load(&pending) > MAX_PENDING && emu_queue_run();) {
  }
}

static emu_item *make_item(item_kind kind, size_t bytes) {
  emu_item *item = calloc(1, bytes);
  if (item)
    item->kind = kind;
  return item;
}

CUresult emu_queue_op(CUstream stream, const emu_op *op) {
  emu_item *item = make_item(ITEM_OP, offsetof(emu_item, op) + emu_op_bytes(op));
  if (!item)
    return CUDA_ERROR_OUT_OF_MEMORY;
  memcpy(&item->op, op, emu_op_bytes(op));
  bool copy = op->kind == EMU_OP_COPY;
  if (copy && op->copy.src_host && emu_is_pageable((void *)op->copy.src, op->copy.bytes)) {
    item->staged = malloc(op->copy.bytes);
    if (!item->staged) {
      free(item);
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    memcpy(item->staged, (void *)op->copy.src, op->copy.bytes);
    item->op.copy.src = (uint64_t)item->staged;
  }
  item->clock = emu_clock_tick(stream);
  item->context = emu_context_of(stream);
  append(stream, item);
  if (copy && op->copy.dst_host && emu_is_pageable((void *)op->copy.dst, op->copy.bytes)) {
    emu_queue_drain(stream);
    emu_clock_host_waits(stream->clock);
  }
  return atomic_load(&stream->device->error);
}

CUresult emu_queue_replay(CUstream stream, emu_replay *replay) {
  emu_item *item = make_item(ITEM_GRAPH, sizeof *item);
  if (!item) {
    emu_replay_free(replay);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  item->replay = replay;
  emu_replay_queued(replay);
  item->clock = emu_clock_tick(stream);
  append(stream, item);
  return atomic_load(&stream->device->error);
}

static CUresult queue_event(CUstream stream, item_kind kind, emu_record *record) {
  emu_item *item = make_item(kind, sizeof *item);
  if (!item)
    return CUDA_ERROR_OUT_OF_MEMORY;
  item->record = emu_record_share(record);
  append(stream, item);
  return CUDA_SUCCESS;
}

CUresult emu_queue_record(CUstream stream, emu_record *record) { return queue_event(stream, ITEM_RECORD, record); }
CUresult emu_queue_wait(CUstream stream, emu_record *record) { return queue_event(stream, ITEM_WAIT, record); }

static CUresult queue_external(CUstream stream, item_kind kind, emu_timeline *timeline, uint64_t value) {
  emu_item *item = make_item(kind, sizeof *item);
  if (!item)
    return CUDA_ERROR_OUT_OF_MEMORY;
  item->timeline = emu_timeline_share(timeline);
  item->value = value;
  item->clock = emu_clock_tick(stream);
  num_external++;
  append(stream, item);
  return CUDA_SUCCESS;
}

CUresult emu_queue_external_wait(CUstream stream, emu_timeline *timeline, uint64_t value) {
  return queue_external(stream, ITEM_EXTERNAL_WAIT, timeline, value);
}

CUresult emu_queue_external_signal(CUstream stream, emu_timeline *timeline, uint64_t value) {
  return queue_external(stream, ITEM_SIGNAL, timeline, value);
}
