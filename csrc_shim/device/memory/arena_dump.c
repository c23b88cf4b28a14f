/* An out-of-memory error says how many bytes the arena holds; this dump lists its chunks by size.
 * Many small free chunks mean fragmentation. A large chunk that "waits for a stream" was freed, but unfinished work of
 * that stream may still use it. */
#include "device/memory/arena_dump.h"

#include <stdint.h>
#include <stdio.h>

typedef struct bin {
  size_t in_use, in_use_bytes, waiting, waiting_bytes, idle, idle_bytes;
} bin;

enum { NUM_BINS = 48, LINE_BYTES = 160 };

static void count_chunk(bin *of, const ocp_chunk *chunk) {
  if (chunk->handed_out) {
    of->in_use++;
    of->in_use_bytes += chunk->size;
  } else if (chunk->freed_at != 0) {
    of->waiting++;
    of->waiting_bytes += chunk->size;
  } else {
    of->idle++;
    of->idle_bytes += chunk->size;
  }
}

void ocp_arena_dump(const ocp_arena *arena, char *text, size_t room) {
  bin bins[NUM_BINS] = {0};
  size_t regions = 0, bytes = 0, reserved = 0, reserved_bytes = 0, largest = 0;
  for (const ocp_region *region = arena->regions; region; region = region->next) {
    regions++;
    bytes += region->size;
    if (region->reserved) {
      reserved++;
      reserved_bytes += region->size;
      continue;
    }
    for (const ocp_chunk *chunk = region->first; chunk; chunk = chunk->right) {
      const unsigned log2 = 63 - (unsigned)__builtin_clzll(chunk->size | 1);
      count_chunk(&bins[log2 < NUM_BINS ? log2 : NUM_BINS - 1], chunk);
      if (!chunk->handed_out && chunk->size > largest)
        largest = chunk->size;
    }
  }
  size_t used =
      (size_t)snprintf(text, room,
                       "the arena holds %zu regions of %zu bytes in all; %zu of them (%zu bytes) are reserved "
                       "for weights; the largest chunk that is not in use has %zu bytes. Chunks by size:",
                       regions, bytes, reserved, reserved_bytes, largest);
  for (unsigned log2 = 0; log2 < NUM_BINS && used + LINE_BYTES < room; log2++) {
    const bin *of = &bins[log2];
    if (of->in_use + of->waiting + of->idle == 0)
      continue;
    used += (size_t)snprintf(text + used, room - used,
                             "\n  from %llu bytes: %zu in use (%zu bytes), %zu wait for a stream (%zu bytes), "
                             "%zu free (%zu bytes)",
                             1ULL << log2, of->in_use, of->in_use_bytes, of->waiting, of->waiting_bytes, of->idle,
                             of->idle_bytes);
  }
}
