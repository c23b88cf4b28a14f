/* The queues of the adversarial mode, which defers the work of streams and graphs. When the program waits, operations
 * run one at a time until the awaited work is done. A seeded random generator picks each operation from those that
 * stream order and events allow. So a program that forgets to wait reads the stale data that it could read on a slow
 * GPU. The functions run with emu_order held. */
#include "emulator/work/queue.h"

#include <stdlib.h>
#include <string.h>

#include "emulator/clock.h"
#include "emulator/work/execute.h"
#include "emulator/work/observe.h"
#include "emulator/work/stream_list.h"

/* Maximum number of deferred operations. Above it, some run although the program does not wait. */
#define MAX_PENDING 4096u

pthread_mutex_t emu_order = PTHREAD_MUTEX_INITIALIZER;

static uint64_t random_state;
static uint64_t sequence; /* number of the next item */
static uint32_t pending;

typedef enum item_kind { ITEM_OP, ITEM_RECORD, ITEM_WAIT, ITEM_GRAPH } item_kind;
typedef struct emu_item {
  struct emu_item *next;
  item_kind kind;
  uint64_t sequence;
  emu_record *record;
  emu_replay *replay;
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

static bool is_ready(const struct CUstream_st *stream) {
  const emu_item *item = stream->head;
  return item && (item->kind != ITEM_WAIT || emu_record_is_done(item->record)) &&
         (item->kind != ITEM_GRAPH || emu_replay_is_next(item->replay)) && legacy_allows(stream);
}

/* Runs the first item of a stream, or the next node if the item is a graph. After a sticky error it only removes the
 * item, and frees the memory of an EMU_OP_FREE, so that every wait ends. */
static void run_first(struct CUstream_st *stream) {
  emu_item *item = stream->head;
  emu_device *device = stream->device;
  bool lost = atomic_load(&device->error) != CUDA_SUCCESS;
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
  emu_record_release(item->record);
  emu_clock_free(item->clock);
  free(item->staged);
  stream->head = item->next;
  if (!stream->head)
    stream->tail = NULL;
  free(item);
  pending--;
  if (stream->destroyed && !stream->head)
    emu_stream_free(stream);
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

void emu_queue_drain(struct CUstream_st *stream) {
  while (stream->head && emu_queue_run()) {
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
  for (pending++; pending > MAX_PENDING && emu_queue_run();) {
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
