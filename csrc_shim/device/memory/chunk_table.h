/* Hash table of chunks by address: open addressing, a power of two of slots, at most half full. */
#ifndef OCP_DEVICE_MEMORY_CHUNK_TABLE_H
#define OCP_DEVICE_MEMORY_CHUNK_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct ocp_region ocp_region; /* arena.h */

/* A span of device or pinned memory. While `handed_out` is true, an allocation owns it. */
typedef struct ocp_chunk {
  uint64_t address;
  size_t size;
  /* Work that may still use a chunk that was given back: the work of stream `stream_id` (0: of all streams) with
   * numbers up to freed_at (pool.h). If freed_at is 0, no work uses the chunk. */
  uint64_t stream_id, freed_at;
  bool handed_out;
  /* The members below are for the arena; the mempool (mempool.c) uses only `older`, for a list of its own. */
  ocp_region *region;
  struct ocp_chunk *left, *right;  /* neighbors in the region */
  struct ocp_chunk *newer, *older; /* neighbors in the list of its bin, while the chunk is not handed out */
  struct ocp_chunk *previous_bound, *next_bound;
} ocp_chunk;

typedef struct ocp_chunk_table {
  ocp_chunk **slots;
  size_t num_slots, count;
} ocp_chunk_table;

ocp_chunk *ocp_chunk_table_find(const ocp_chunk_table *table, uint64_t address); /* NULL: no chunk starts there */
bool ocp_chunk_table_insert(ocp_chunk_table *table, ocp_chunk *chunk);           /* false: out of host memory */
void ocp_chunk_table_erase(ocp_chunk_table *table, const ocp_chunk *chunk);

#endif
