/* A best-fit arena with coalescing: regions of the driver's memory, cut into chunks that are handed out and come
 * back. It handles addresses and sizes only and never calls the driver. Private to this folder; all functions run under
 * the pool's lock, except for ocp_arena_round.
 *
 * Chunks come back in stream order. A chunk that work of a stream may still use is *bound*: that stream can get it
 * again at once, other streams when they wait for the work or when it has finished.
 *
 *                              cuMemAlloc
 *                                  |
 *              first bytes         v        the rest
 *            +----------------- (region) ----------------+
 *            |                     ^                     |
 *            |                     | remove_unused: it covers its region; cuMemFree
 *            |                     +-------------------+ |
 *            v                                         | v
 *      +------------+     take: for any stream        +------+
 *      |            |<--------------------------------|      |
 *      | handed out |                                 | free |
 *      |            |-------------------------------->|      |
 *      +------------+     give: no work uses it       +------+
 *         |      ^                                       ^
 *    give |      | take: for its own stream, or for      | unbind: the work
 *         |      | a stream that waits for its work      | has finished
 *         v      |                                       |
 *      +------------+                                    |
 *      |   bound    |------------------------------------+
 *      +------------+
 *
 * Invariants:
 * - The chunks of a region follow each other without gaps and cover it, linked from left to right.
 * - Every chunk is in the chunk table. A chunk that is not handed out is in the bin of its size, and a bound one also
 *   in the list of bound chunks.
 * - freed_at is 0 in a free chunk and not 0 in a bound one. stream_id is 0 in a free chunk, and in a bound chunk that
 *   work of any stream may use.
 * - No two neighbors are both free, or both bound to the same stream: they would have merged.
 * - A reserved region is one chunk, handed out. When the chunk is given back, the region leaves the arena; if work may
 *   still use the chunk, the region becomes an ordinary one. */
#ifndef OCP_DEVICE_MEMORY_ARENA_H
#define OCP_DEVICE_MEMORY_ARENA_H

#include "device/arena_options.h"
#include "device/memory/chunk_table.h"
#include "device/pool.h"
#include "device/stream.h"

enum { OCP_ARENA_ALIGNMENT = 256, OCP_ARENA_BINS = 320 };
#define OCP_ARENA_MAX_BYTES ((size_t)1 << 47)

/* One allocation from the driver. */
struct ocp_region {
  ocp_region *previous, *next;
  uint64_t address;
  size_t size;
  ocp_chunk *first; /* the chunks cover the region */
  bool reserved;    /* true: the region is one long-lived allocation (ocp_device_reserve), not part of the arena */
};

struct ocp_arena {
  ocp_arena_config config;
  ocp_chunk *newest[OCP_ARENA_BINS], *oldest[OCP_ARENA_BINS]; /* both ends of each bin's list */
  uint64_t bin_mask[OCP_ARENA_BINS / 64];
  ocp_chunk *bound;
  ocp_region *regions;
  ocp_region *unfreed;   /* unused regions that the driver could not free yet; linked by `next`, without chunks */
  ocp_chunk_table table; /* all chunks by address */
  ocp_chunk *spare;      /* unused ocp_chunk structs, linked by `older` */
  size_t next_region_bytes;
  size_t most_growth_bytes; /* maximum bytes to which regions grow, besides the limit in the options; 0: no maximum */
  int64_t pooled_bytes;     /* bytes that the arena's limit counts for the CUDA pool that replaces the arena */
  ocp_memory_stats stats;
};

/* Returns the size of the chunk for a request: its bytes plus `redzone`, rounded up. `redzone` is not 0 only in the
 * emulated device's checking mode, which uses these bytes to detect overruns. */
size_t ocp_arena_round(size_t bytes, size_t redzone);

/* Allocates a chunk of at least `size` bytes (rounded) that the stream `taker` may use at once (NULL: that every stream
 * may), and splits it if it is much larger. Returns NULL if no such chunk is free, or if
 * unfinished work may still use those that are. */
ocp_chunk *ocp_arena_take(ocp_pool *pool, ocp_arena *arena, size_t size, const ocp_stream *taker);
/* Gives back a chunk that was handed out. The caller has set its stream_id and freed_at. */
void ocp_arena_give(ocp_pool *pool, ocp_arena *arena, ocp_chunk *chunk);
/* Frees the bound chunks whose work has finished, and merges them. Returns whether there was any. */
bool ocp_arena_unbind(ocp_pool *pool, ocp_arena *arena);

/* Returns the size of the next region for a request of `size` bytes, by the extend strategy and the remaining limit; 0
 * if the limit leaves less than `size`. `exactly` ignores the strategy. The bytes count as held from now on; call
 * ocp_arena_cancel if the driver does not give them. */
size_t ocp_arena_plan_region(ocp_arena *arena, size_t size, bool exactly);
void ocp_arena_cancel(ocp_arena *arena, size_t region_bytes);
/* Adds memory from the driver as a region, and allocates its first `size` bytes. Returns NULL if host memory is
 * exhausted. */
ocp_chunk *ocp_arena_add_region(ocp_arena *arena, uint64_t address, size_t region_bytes, size_t size);

/* The arena's limit and statistics include memory that a CUDA pool hands out in its place. ocp_arena_expect_pooled
 * counts bytes before the pool is asked, and returns false if the limit leaves less. ocp_arena_pooled counts an
 * allocation that the pool has made. ocp_arena_pooled_given_back counts that its owner has freed it, and
 * ocp_arena_pooled_freed that the pool has taken it back, or has refused an allocation. */
bool ocp_arena_expect_pooled(ocp_arena *arena, size_t size);
void ocp_arena_pooled(ocp_arena *arena, size_t size);
void ocp_arena_pooled_given_back(ocp_arena *arena, size_t size);
void ocp_arena_pooled_freed(ocp_arena *arena, size_t size);

/* Count the memory of a removed region as held again, because the driver has not freed it. After
 * ocp_arena_keep_unfreed, the next ocp_arena_remove_unused returns the region, so that the driver can free it then.
 * After ocp_arena_lose, the bytes count as held until the process ends. */
void ocp_arena_keep_unfreed(ocp_arena *arena, ocp_region *region);
void ocp_arena_lose(ocp_arena *arena, size_t region_bytes);

/* Remove all unused regions, or one region if it is unused; return them linked by `next`, for the driver to free. NULL:
 * no region is unused. */
ocp_region *ocp_arena_remove_unused(ocp_pool *pool, ocp_arena *arena);
ocp_region *ocp_arena_remove_region(ocp_pool *pool, ocp_arena *arena, ocp_region *region);
/* Resets the size of the next region to initial_growth_chunk_size_bytes. Called when a shrink removes regions. */
void ocp_arena_restart_growth(ocp_arena *arena);

#endif
