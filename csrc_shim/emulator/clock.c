/* Happens-before race detection between operations of streams: keeps a vector clock for each stream and one for the
 * host, and for each granule (256 bytes) of device memory the last accesses to it. If no chain of stream order, events
 * and host waits orders two accesses to the same bytes, and one of the accesses is a write, the program lacks a wait.
 *
 * All host threads count as one, since the emulator does not see how they synchronize. */
#include "emulator/clock.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "emulator/state.h"

/* Entries of a vector clock, one for each stream. Streams beyond that number share the last entry, so that some races
 * are missed. */
#define MAX_SLOTS 4096u
#define NAMES 16u /* number of latest operations per stream whose names are stored, for reports */
#define NAME_BYTES 64u

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint32_t host[MAX_SLOTS];
static uint32_t num_slots;
static uint32_t last_time[MAX_SLOTS];
static uint32_t free_slots[MAX_SLOTS], num_free;
static emu_clock *blocking[EMU_MAX_DEVICES]; /* the blocking streams' clocks joined: the null stream waits for them */
static char (*names)[NAMES][NAME_BYTES];     /* [slot][time % NAMES] */

static emu_clock *copy_of(const emu_clock *clock) {
  size_t bytes = sizeof *clock + clock->count * sizeof clock->times[0];
  emu_clock *copy = malloc(bytes);
  if (copy)
    memcpy(copy, clock, bytes);
  return copy;
}

static emu_clock *grow(emu_clock *clock, uint32_t count) {
  if (clock && clock->count >= count)
    return clock;
  uint32_t before = clock ? clock->count : 0;
  emu_clock *grown = realloc(clock, sizeof *grown + count * sizeof grown->times[0]);
  if (!grown)
    return clock;
  if (!before)
    grown->slot = grown->time = 0;
  memset(&grown->times[before], 0, (count - before) * sizeof grown->times[0]);
  grown->count = count;
  return grown;
}

static void join(emu_clock *clock, const uint32_t *times, uint32_t count) {
  for (uint32_t slot = 0; clock && slot < count && slot < clock->count; slot++)
    if (clock->times[slot] < times[slot])
      clock->times[slot] = times[slot];
}

static void join_clock(emu_clock **clock, const emu_clock *other) {
  if (!other)
    return;
  *clock = grow(*clock, other->count);
  join(*clock, other->times, other->count);
}

/* Returns the stream's clock, and makes it on first use. */
static emu_clock *clock_of(CUstream stream) {
  if (!stream->clock) {
    uint32_t slot = num_free > 0 ? free_slots[--num_free] : num_slots < MAX_SLOTS ? num_slots++ : MAX_SLOTS - 1;
    stream->clock = grow(NULL, num_slots);
    if (stream->clock) {
      stream->clock->slot = slot;
      stream->clock->time = last_time[slot];
    }
  }
  if (stream->clock)
    stream->clock = grow(stream->clock, num_slots);
  return stream->clock;
}

emu_clock *emu_clock_tick(CUstream stream) {
  if (!emu.config.check)
    return NULL;
  pthread_mutex_lock(&lock);
  emu_clock *clock = clock_of(stream), *copy = NULL;
  if (clock) {
    emu_device *device = stream->device;
    join(clock, host, num_slots);
    if (stream == &device->legacy)
      join_clock(&stream->clock, blocking[device->ordinal]);
    else if (!(stream->flags & CU_STREAM_NON_BLOCKING))
      join_clock(&stream->clock, device->legacy.clock);
    clock = stream->clock;
    clock->time = clock->times[clock->slot] = last_time[clock->slot] = clock->time + 1;
    if (stream != &device->legacy && !(stream->flags & CU_STREAM_NON_BLOCKING))
      join_clock(&blocking[device->ordinal], clock);
    copy = copy_of(clock);
  }
  pthread_mutex_unlock(&lock);
  return copy;
}

emu_clock *emu_clock_snapshot(CUstream stream) {
  if (!emu.config.check)
    return NULL;
  pthread_mutex_lock(&lock);
  emu_clock *clock = clock_of(stream), *copy = clock ? copy_of(clock) : NULL;
  pthread_mutex_unlock(&lock);
  return copy;
}

void emu_clock_join(CUstream stream, const emu_clock *other) {
  if (!emu.config.check || !other)
    return;
  pthread_mutex_lock(&lock);
  if (clock_of(stream))
    join_clock(&stream->clock, other);
  pthread_mutex_unlock(&lock);
}

void emu_clock_host_waits(const emu_clock *clock) {
  if (!emu.config.check || !clock)
    return;
  pthread_mutex_lock(&lock);
  for (uint32_t slot = 0; slot < clock->count; slot++)
    if (host[slot] < clock->times[slot])
      host[slot] = clock->times[slot];
  pthread_mutex_unlock(&lock);
}

emu_clock *emu_clock_of_host(void) {
  if (!emu.config.check)
    return NULL;
  pthread_mutex_lock(&lock);
  emu_clock *clock = grow(NULL, num_slots);
  join(clock, host, num_slots);
  pthread_mutex_unlock(&lock);
  return clock;
}

void emu_clock_follow(emu_clock **clock, const emu_clock *other) {
  if (!*clock || !other)
    return;
  pthread_mutex_lock(&lock);
  join_clock(clock, other);
  pthread_mutex_unlock(&lock);
}

void emu_clock_free(emu_clock *clock) { free(clock); }

void emu_clock_end(CUstream stream) {
  if (!stream->clock)
    return;
  pthread_mutex_lock(&lock);
  if (num_free < MAX_SLOTS && stream->clock->slot != MAX_SLOTS - 1)
    free_slots[num_free++] = stream->clock->slot;
  free(stream->clock);
  stream->clock = NULL;
  pthread_mutex_unlock(&lock);
}

/* ---- names ---- */

void emu_clock_name(const emu_clock *clock, const char *name) {
  pthread_mutex_lock(&lock);
  if (!names)
    names = calloc(MAX_SLOTS, sizeof *names);
  if (names)
    snprintf(names[clock->slot][clock->time % NAMES], NAME_BYTES, "%s", name);
  pthread_mutex_unlock(&lock);
}

/* ---- accesses, packed: slot in 16 bits, time in 32, first and last byte in the granule in 8 each ---- */

static uint64_t pack(const emu_clock *clock, uint32_t first, uint32_t last) {
  return (uint64_t)clock->slot << 48 | (uint64_t)clock->time << 16 | first << 8 | last;
}
static uint32_t slot_of(uint64_t access) { return (uint32_t)(access >> 48); }
static uint32_t time_of(uint64_t access) { return (uint32_t)(access >> 16); }
static uint32_t first_of(uint64_t access) { return access >> 8 & 255; }
static uint32_t last_of(uint64_t access) { return access & 255; }

static bool is_before(uint64_t access, const emu_clock *clock) {
  uint32_t slot = slot_of(access);
  return slot == clock->slot || (slot < clock->count && clock->times[slot] >= time_of(access));
}

static bool overlaps(uint64_t access, uint32_t first, uint32_t last) {
  return first_of(access) <= last && first <= last_of(access);
}

static bool covers(uint64_t access, uint32_t first, uint32_t last) {
  return first_of(access) <= first && last <= last_of(access);
}

static bool is_own(uint64_t access, const emu_clock *clock) {
  return access && slot_of(access) == clock->slot && time_of(access) == clock->time;
}

/* Stores an access, joined with an earlier one (`before`) of the same operation. Two host threads that run blocks of
 * one launch may overwrite each other's range: the check then misses races, but reports no false ones. */
static void store(_Atomic uint64_t *place, uint64_t before, const emu_clock *clock, uint32_t first, uint32_t last) {
  if (is_own(before, clock)) {
    first = first < first_of(before) ? first : first_of(before);
    last = last > last_of(before) ? last : last_of(before);
  }
  atomic_store_explicit(place, pack(clock, first, last), memory_order_relaxed);
}

uint64_t emu_history_note(emu_history *history, const emu_clock *clock, uint32_t first, uint32_t last,
                          emu_access access) {
  uint64_t written = atomic_load_explicit(&history->write, memory_order_relaxed), conflict = 0;
  uint64_t updated = atomic_load_explicit(&history->atomic, memory_order_relaxed);
  /* Returns early if the same operation has already recorded this range, and so compared it with other accesses. */
  if (access == EMU_STORE && is_own(written, clock) && covers(written, first, last))
    return 0;
  if (access == EMU_ATOMIC && is_own(updated, clock) && covers(updated, first, last))
    return 0;
  uint64_t reads[2] = {atomic_load_explicit(&history->reads[0], memory_order_relaxed),
                       atomic_load_explicit(&history->reads[1], memory_order_relaxed)};
  if (access == EMU_LOAD && is_own(reads[0], clock) && covers(reads[0], first, last))
    return 0;
  if (written && overlaps(written, first, last) && !is_before(written, clock))
    conflict = written;
  if (access != EMU_ATOMIC && updated && overlaps(updated, first, last) && !is_before(updated, clock))
    conflict = updated;
  if (access != EMU_LOAD) {
    for (int i = 0; i < 2; i++)
      if (reads[i] && overlaps(reads[i], first, last) && !is_before(reads[i], clock))
        conflict = reads[i];
    if (access == EMU_STORE)
      store(&history->write, written, clock, first, last);
    else
      store(&history->atomic, updated, clock, first, last);
    return conflict;
  }
  /* A granule stores two reads. This read replaces one by the same operation; else the first one if that is absent or
   * happens before this read; else the second one. */
  int place = is_own(reads[0], clock)                   ? 0
              : is_own(reads[1], clock)                 ? 1
              : !reads[0] || is_before(reads[0], clock) ? 0
                                                        : 1;
  store(&history->reads[place], reads[place], clock, first, last);
  return conflict;
}

void emu_clock_describe(uint64_t access, char *text, size_t text_bytes) {
  pthread_mutex_lock(&lock);
  uint32_t slot = slot_of(access), time = time_of(access);
  bool kept = names && slot < num_slots && last_time[slot] - time < NAMES;
  snprintf(text, text_bytes, "%s of stream %u", kept ? names[slot][time % NAMES] : "an operation", slot);
  pthread_mutex_unlock(&lock);
}
