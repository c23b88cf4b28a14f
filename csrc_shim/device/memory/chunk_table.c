#include "device/memory/chunk_table.h"

#include <assert.h>
#include <stdlib.h>

enum { ALIGNMENT = 256 };

static size_t home_of(const ocp_chunk_table *table, uint64_t address) {
  return (size_t)((address / ALIGNMENT) * 0x9E3779B97F4A7C15u >> 20) & (table->num_slots - 1);
}

/* Returns the slot of the chunk at the address, or the empty slot where such a chunk would be inserted. */
static size_t find_slot(const ocp_chunk_table *table, uint64_t address) {
  size_t slot = home_of(table, address);
  while (table->slots[slot] && table->slots[slot]->address != address)
    slot = (slot + 1) & (table->num_slots - 1);
  return slot;
}

ocp_chunk *ocp_chunk_table_find(const ocp_chunk_table *table, uint64_t address) {
  return table->num_slots ? table->slots[find_slot(table, address)] : NULL;
}

static bool grow(ocp_chunk_table *table) {
  ocp_chunk_table grown = {.num_slots = table->num_slots ? 2 * table->num_slots : 256, .count = table->count};
  grown.slots = calloc(grown.num_slots, sizeof *grown.slots);
  if (!grown.slots)
    return false;
  for (size_t i = 0; i < table->num_slots; i++)
    if (table->slots[i])
      grown.slots[find_slot(&grown, table->slots[i]->address)] = table->slots[i];
  free(table->slots);
  *table = grown;
  return true;
}

bool ocp_chunk_table_insert(ocp_chunk_table *table, ocp_chunk *chunk) {
  if (2 * (table->count + 1) > table->num_slots && !grow(table))
    return false;
  table->slots[find_slot(table, chunk->address)] = chunk;
  table->count++;
  return true;
}

void ocp_chunk_table_erase(ocp_chunk_table *table, const ocp_chunk *chunk) {
  size_t hole = find_slot(table, chunk->address), mask = table->num_slots - 1;
  assert(table->slots[hole] == chunk);
  /* Chunks behind the hole move into it unless that would put them before the slot where their search starts. */
  for (size_t slot = (hole + 1) & mask; table->slots[slot]; slot = (slot + 1) & mask) {
    const size_t home = home_of(table, table->slots[slot]->address);
    if (((slot - home) & mask) >= ((slot - hole) & mask)) {
      table->slots[hole] = table->slots[slot];
      hole = slot;
    }
  }
  table->slots[hole] = NULL;
  table->count--;
}
