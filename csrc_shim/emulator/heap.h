/* A two-level segregated-fit allocator over an address range, with its tables outside the range. */
#ifndef OCP_EMULATOR_HEAP_H
#define OCP_EMULATOR_HEAP_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EMU_GRANULE 256u /* bytes; alignment and unit of allocations, and unit of the missing-wait check */
typedef struct emu_heap_block emu_heap_block;
#define EMU_HEAP_BINS 256
#define EMU_HEAP_LEVELS 6
typedef struct emu_heap {
  pthread_mutex_t lock;
  uint64_t base;     /* first address handed out */
  ptrdiff_t alias;   /* add it to an address to get the host pointer of its bytes */
  uint64_t bytes;    /* length of the address range, a multiple of EMU_GRANULE */
  uint64_t capacity; /* maximum bytes of live (allocated) blocks */
  uint64_t used;     /* bytes of live blocks, rounded to granules */
  uint32_t redzone;  /* bytes that stay unallocated behind each block */
  emu_heap_block *blocks;
  uint64_t *starts[EMU_HEAP_LEVELS]; /* bitmap of the granules where a block starts, and its summaries */
  uint32_t levels;
  uint64_t bin_mask[EMU_HEAP_BINS / 64];
  uint32_t bins[EMU_HEAP_BINS];
  void *tables;
  size_t tables_bytes;
} emu_heap;
/* Makes a heap over the range. Returns 0, or -1 when the tables cannot be mapped. The heap owns its tables, not the
 * range. */
int emu_heap_init(emu_heap *heap, uint64_t base, ptrdiff_t alias, uint64_t bytes, uint64_t capacity, uint32_t redzone);
void emu_heap_destroy(emu_heap *heap);
uint64_t emu_heap_alloc(emu_heap *heap, uint64_t bytes); /* 0: out of memory */
bool emu_heap_free(emu_heap *heap, uint64_t address);    /* false: no block starts there */
/* Whether [address, address + bytes) lies in one live block; stores the block's start and size through the pointers
 * that are not NULL. */
bool emu_heap_find(emu_heap *heap, uint64_t address, uint64_t bytes, uint64_t *start, uint64_t *size);
/* Returns the number of bytes that the live block at the address occupies: its rounded size and its red zone. */
uint64_t emu_heap_held(emu_heap *heap, uint64_t address);
/* Finds the live block that starts at or nearest below the address, even if the address is beyond the block's end. */
bool emu_heap_around(emu_heap *heap, uint64_t address, uint64_t *start, uint64_t *size);
void emu_heap_visit(emu_heap *heap, void (*visit)(void *context, uint64_t address, uint64_t bytes), void *context);

#endif
