#include "device/memory/arena.h"

#include <assert.h>
#include <stdlib.h>

#include "device/order.h"

/* Maximum number of chunks that a search examines at each end of a bin. A usable chunk that the search misses only
 * costs memory. The newest chunks are warm in caches; work on the oldest has most likely finished. */
enum { MAX_LOOKS = 8 };

size_t ocp_arena_round(size_t bytes, size_t redzone) {
  const size_t alignment = OCP_ARENA_ALIGNMENT;
  return ((bytes ? bytes : 1) + redzone + alignment - 1) / alignment * alignment;
}

static void count_allocation(ocp_memory_stats *stats, size_t size) {
  const int64_t bytes = (int64_t)size;
  stats->num_allocs++;
  stats->in_use += bytes;
  if (stats->in_use > stats->max_in_use)
    stats->max_in_use = stats->in_use;
  if (bytes > stats->max_alloc_size)
    stats->max_alloc_size = bytes;
}

/* ---- bins (size classes): one for each size below 8 units of 256 bytes, then eight for each power of two ---- */

static unsigned bin_of(size_t size) {
  const uint64_t units = size / OCP_ARENA_ALIGNMENT;
  if (units < 8)
    return (unsigned)units;
  const unsigned log2 = 63 - (unsigned)__builtin_clzll(units);
  return (log2 - 2) * 8 + (units >> (log2 - 3) & 7);
}
_Static_assert((39 - 2) * 8 + 7 < OCP_ARENA_BINS, "the largest chunk has a bin");

static void bin_add(ocp_arena *arena, ocp_chunk *chunk) {
  const unsigned bin = bin_of(chunk->size);
  chunk->newer = NULL;
  chunk->older = arena->newest[bin];
  *(chunk->older ? &chunk->older->newer : &arena->oldest[bin]) = chunk;
  arena->newest[bin] = chunk;
  arena->bin_mask[bin / 64] |= UINT64_C(1) << bin % 64;
}

static void bin_remove(ocp_arena *arena, ocp_chunk *chunk) {
  const unsigned bin = bin_of(chunk->size);
  *(chunk->newer ? &chunk->newer->older : &arena->newest[bin]) = chunk->older;
  *(chunk->older ? &chunk->older->newer : &arena->oldest[bin]) = chunk->newer;
  if (!arena->newest[bin])
    arena->bin_mask[bin / 64] &= ~(UINT64_C(1) << bin % 64);
}

/* Returns the first non-empty bin from `bin` on; OCP_ARENA_BINS if all of these are empty. */
static unsigned next_bin(const ocp_arena *arena, unsigned bin) {
  for (unsigned word = bin / 64; word < OCP_ARENA_BINS / 64; word++, bin = word * 64) {
    const uint64_t rest = arena->bin_mask[word] >> bin % 64;
    if (rest)
      return bin + (unsigned)__builtin_ctzll(rest);
  }
  return OCP_ARENA_BINS;
}

/* ---- bound chunks: free, but unfinished work of a stream may still use them ---- */

static bool is_bound(const ocp_chunk *chunk) { return chunk->freed_at != 0; }

static void bound_add(ocp_arena *arena, ocp_chunk *chunk) {
  chunk->previous_bound = NULL;
  chunk->next_bound = arena->bound;
  if (arena->bound)
    arena->bound->previous_bound = chunk;
  arena->bound = chunk;
  arena->stats.num_bound_chunks++;
}

static void bound_remove(ocp_arena *arena, ocp_chunk *chunk) {
  *(chunk->previous_bound ? &chunk->previous_bound->next_bound : &arena->bound) = chunk->next_bound;
  if (chunk->next_bound)
    chunk->next_bound->previous_bound = chunk->previous_bound;
  arena->stats.num_bound_chunks--;
}

static void enter(ocp_arena *arena, ocp_chunk *chunk) {
  bin_add(arena, chunk);
  if (is_bound(chunk))
    bound_add(arena, chunk);
}

static void leave(ocp_arena *arena, ocp_chunk *chunk) {
  bin_remove(arena, chunk);
  if (is_bound(chunk))
    bound_remove(arena, chunk);
}

/* ---- chunks of a region ---- */

static ocp_chunk *make_chunk(ocp_arena *arena) {
  ocp_chunk *chunk = arena->spare;
  if (!chunk)
    return calloc(1, sizeof *chunk);
  arena->spare = chunk->older;
  *chunk = (ocp_chunk){0};
  return chunk;
}

static void drop_chunk(ocp_arena *arena, ocp_chunk *chunk) {
  ocp_chunk_table_erase(&arena->table, chunk);
  chunk->older = arena->spare;
  arena->spare = chunk;
}

/* Merges the chunk with its right neighbor; neither of them is in a bin. */
static void absorb_right(ocp_arena *arena, ocp_chunk *chunk) {
  ocp_chunk *right = chunk->right;
  chunk->size += right->size;
  chunk->right = right->right;
  if (chunk->right)
    chunk->right->left = chunk;
  if (right->freed_at > chunk->freed_at)
    chunk->freed_at = right->freed_at;
  drop_chunk(arena, right);
}

static bool can_merge(const ocp_chunk *chunk, const ocp_chunk *neighbor) {
  return neighbor && !neighbor->handed_out && is_bound(chunk) == is_bound(neighbor) &&
         chunk->stream_id == neighbor->stream_id;
}

/* Merges a chunk that is not allocated, and not in a bin, with neighbors that are in the same state: all free, or all
 * bound to the same stream. Puts the result into its bin. */
static void merge(ocp_arena *arena, ocp_chunk *chunk) {
  if (can_merge(chunk, chunk->right)) {
    leave(arena, chunk->right);
    absorb_right(arena, chunk);
  }
  if (can_merge(chunk, chunk->left)) {
    chunk = chunk->left;
    leave(arena, chunk);
    absorb_right(arena, chunk);
  }
  enter(arena, chunk);
}

/* Splits an allocated chunk at `size` and puts the rest into its bin. If host memory is exhausted, the chunk stays
 * whole. */
static void cut(ocp_arena *arena, ocp_chunk *chunk, size_t size) {
  ocp_chunk *rest = make_chunk(arena);
  if (!rest)
    return;
  rest->address = chunk->address + size;
  rest->size = chunk->size - size;
  rest->region = chunk->region;
  rest->stream_id = chunk->stream_id;
  rest->freed_at = chunk->freed_at;
  if (!ocp_chunk_table_insert(&arena->table, rest)) {
    free(rest);
    return;
  }
  rest->left = chunk;
  rest->right = chunk->right;
  if (rest->right)
    rest->right->left = rest;
  chunk->right = rest;
  chunk->size = size;
  merge(arena, rest);
}

/* ---- allocation and free ---- */

/* Limits internal fragmentation: the unused end of a chunk has at most an eighth of the requested bytes, and fewer than
 * max_dead_bytes_per_chunk. */
static bool is_too_large(const ocp_arena *arena, const ocp_chunk *chunk, size_t size) {
  const size_t dead = chunk->size - size;
  return dead > size / 8 || (dead > 0 && dead >= (size_t)arena->config.max_dead_bytes_per_chunk);
}

static ocp_chunk *find(const ocp_pool *pool, const ocp_arena *arena, size_t size, const ocp_stream *taker) {
  for (unsigned bin = bin_of(size); (bin = next_bin(arena, bin)) < OCP_ARENA_BINS; bin++)
    for (int end = 0; end < 2; end++) {
      ocp_chunk *chunk = end == 0 ? arena->newest[bin] : arena->oldest[bin];
      for (int looks = 0; chunk && looks < MAX_LOOKS; chunk = end == 0 ? chunk->older : chunk->newer, looks++) {
        if (chunk->size < size)
          continue;
        if (!is_bound(chunk) || ocp_pool_is_finished(pool, chunk->stream_id, chunk->freed_at, taker))
          return chunk;
      }
    }
  return NULL;
}

static void hand_out(ocp_arena *arena, ocp_chunk *chunk, size_t size) {
  chunk->handed_out = true;
  if (is_too_large(arena, chunk, size))
    cut(arena, chunk, size);
  count_allocation(&arena->stats, chunk->size);
}

ocp_chunk *ocp_arena_take(ocp_pool *pool, ocp_arena *arena, size_t size, const ocp_stream *taker) {
  ocp_chunk *chunk = find(pool, arena, size, taker);
  if (!chunk)
    return NULL;
  leave(arena, chunk);
  hand_out(arena, chunk, size);
  return chunk;
}

void ocp_arena_give(ocp_pool *pool, ocp_arena *arena, ocp_chunk *chunk) {
  chunk->handed_out = false;
  arena->stats.in_use -= (int64_t)chunk->size;
  if (ocp_pool_is_finished(pool, chunk->stream_id, chunk->freed_at, NULL))
    chunk->stream_id = chunk->freed_at = 0;
  merge(arena, chunk);
}

bool ocp_arena_unbind(ocp_pool *pool, ocp_arena *arena) {
  bool any = false;
  for (ocp_chunk *chunk = arena->bound, *next; chunk; chunk = next) {
    next = chunk->next_bound; /* stays valid: the chunk becomes free and merges with free chunks, not with bound ones */
    if (!ocp_pool_is_finished(pool, chunk->stream_id, chunk->freed_at, NULL))
      continue;
    leave(arena, chunk);
    chunk->stream_id = chunk->freed_at = 0;
    merge(arena, chunk);
    any = true;
  }
  return any;
}

/* ---- regions ---- */

/* Returns the maximum size to which regions grow; a larger request gets a region of its own size. */
static size_t most_growth(const ocp_arena *arena) {
  const size_t most = ocp_arena_round((size_t)arena->config.max_power_of_two_extend_bytes, 0);
  return arena->most_growth_bytes && arena->most_growth_bytes < most ? arena->most_growth_bytes : most;
}

static size_t planned_bytes(ocp_arena *arena, size_t size, bool exactly) {
  if (exactly || arena->config.extend_strategy == OCP_EXTEND_SAME_AS_REQUESTED)
    return size;
  const size_t most = most_growth(arena);
  size_t start = arena->next_region_bytes;
  if (!start)
    start = ocp_arena_round((size_t)arena->config.initial_chunk_size_bytes, 0);
  if (size > start && size > most)
    return size;
  size_t bytes = start;
  while (bytes < size)
    bytes *= 2;
  if (bytes > start && bytes > most)
    bytes = most;
  const bool grows = bytes == start && start <= most / 2;
  arena->next_region_bytes = grows ? 2 * start : bytes < most ? bytes : most;
  return bytes;
}

/* Returns the number of bytes left below the limit; negative if the limit was lowered below the bytes held. */
static int64_t bytes_left(const ocp_arena *arena) {
  return arena->config.max_mem - arena->stats.total - arena->pooled_bytes;
}

size_t ocp_arena_plan_region(ocp_arena *arena, size_t size, bool exactly) {
  const int64_t left = bytes_left(arena);
  size_t bytes = planned_bytes(arena, size, exactly);
  if (left < 0 || (uint64_t)left < size)
    return 0;
  if (bytes > OCP_ARENA_MAX_BYTES && bytes > size)
    bytes = size > OCP_ARENA_MAX_BYTES ? size : OCP_ARENA_MAX_BYTES; /* the chunk size of the largest bin */
  if ((uint64_t)left < bytes)
    bytes = (size_t)left / OCP_ARENA_ALIGNMENT * OCP_ARENA_ALIGNMENT;
  arena->stats.total += (int64_t)bytes;
  return bytes;
}

void ocp_arena_cancel(ocp_arena *arena, size_t region_bytes) { arena->stats.total -= (int64_t)region_bytes; }

void ocp_arena_restart_growth(ocp_arena *arena) {
  arena->next_region_bytes = ocp_arena_round((size_t)arena->config.initial_growth_chunk_size_bytes, 0);
}

ocp_chunk *ocp_arena_add_region(ocp_arena *arena, uint64_t address, size_t region_bytes, size_t size) {
  ocp_region *region = calloc(1, sizeof *region);
  ocp_chunk *chunk = make_chunk(arena);
  if (!region || !chunk) {
    free(region);
    free(chunk);
    return NULL;
  }
  chunk->address = address;
  chunk->size = region_bytes;
  chunk->region = region;
  if (!ocp_chunk_table_insert(&arena->table, chunk)) {
    free(region);
    free(chunk);
    return NULL;
  }
  *region = (ocp_region){.next = arena->regions, .address = address, .size = region_bytes, .first = chunk};
  if (arena->regions)
    arena->regions->previous = region;
  arena->regions = region;
  hand_out(arena, chunk, size);
  return chunk;
}

/* ---- accounting for a CUDA pool that replaces the arena ---- */

bool ocp_arena_expect_pooled(ocp_arena *arena, size_t size) {
  const int64_t left = bytes_left(arena);
  if (left < 0 || (uint64_t)left < size)
    return false;
  arena->pooled_bytes += (int64_t)size;
  return true;
}

void ocp_arena_pooled(ocp_arena *arena, size_t size) { count_allocation(&arena->stats, size); }

void ocp_arena_pooled_given_back(ocp_arena *arena, size_t size) { arena->stats.in_use -= (int64_t)size; }

void ocp_arena_pooled_freed(ocp_arena *arena, size_t size) { arena->pooled_bytes -= (int64_t)size; }

/* ---- unused regions ---- */

static bool is_unused(const ocp_pool *pool, const ocp_region *region) {
  for (const ocp_chunk *chunk = region->first; chunk; chunk = chunk->right)
    if (chunk->handed_out || (is_bound(chunk) && !ocp_pool_is_finished(pool, chunk->stream_id, chunk->freed_at, NULL)))
      return false;
  return true;
}

static void take_out(ocp_arena *arena, ocp_region *region) {
  for (ocp_chunk *chunk = region->first, *right; chunk; chunk = right) {
    right = chunk->right;
    leave(arena, chunk);
    drop_chunk(arena, chunk);
  }
  *(region->previous ? &region->previous->next : &arena->regions) = region->next;
  if (region->next)
    region->next->previous = region->previous;
  arena->stats.total -= (int64_t)region->size;
}

void ocp_arena_lose(ocp_arena *arena, size_t region_bytes) { arena->stats.total += (int64_t)region_bytes; }

void ocp_arena_keep_unfreed(ocp_arena *arena, ocp_region *region) {
  arena->stats.total += (int64_t)region->size;
  region->next = arena->unfreed;
  arena->unfreed = region;
}

ocp_region *ocp_arena_remove_unused(ocp_pool *pool, ocp_arena *arena) {
  ocp_region *removed = arena->unfreed;
  arena->unfreed = NULL;
  for (const ocp_region *region = removed; region; region = region->next)
    arena->stats.total -= (int64_t)region->size;
  for (ocp_region *region = arena->regions, *next; region; region = next) {
    next = region->next;
    if (!is_unused(pool, region))
      continue;
    take_out(arena, region);
    region->next = removed;
    removed = region;
  }
  return removed;
}

ocp_region *ocp_arena_remove_region(ocp_pool *pool, ocp_arena *arena, ocp_region *region) {
  if (!is_unused(pool, region))
    return NULL;
  take_out(arena, region);
  region->next = NULL;
  return region;
}
