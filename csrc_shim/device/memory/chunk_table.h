/* Chunks by address: open addressing, a power of two of slots, at most half full. */
#ifndef OCP_DEVICE_MEMORY_CHUNK_TABLE_H
#define OCP_DEVICE_MEMORY_CHUNK_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct ocp_region ocp_region; /* arena.c */

/* A span of device or pinned memory: handed out, or free and waiting to be. */
typedef struct ocp_chunk {
  uint64_t address;
  size_t size;
  /* Work that may still use it: of the stream with that id, or of any stream for 0, up to that number (pool.h). Free
   * chunks with freed_at == 0 have no user. */
  uint64_t stream_id, freed_at;
  bool handed_out;
  /* of the arena */
  ocp_region *region;
  struct ocp_chunk *left, *right;  /* neighbours in the region */
  struct ocp_chunk *newer, *older; /* of its bin, while free */
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
