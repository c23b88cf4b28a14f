/* An allocator that never touches the memory it manages. It has two-level segregated free lists (eight size classes per
 * power of two), and a bitmap of block starts with summary levels (a bit for each non-zero word of the level below), by
 * which it finds neighbors and the block around an address. Every operation on one block takes constant time, except
 * an allocation that only blocks of its own size class can serve: it searches that class. */
#include "emulator/heap.h"

#include <sys/mman.h>

/* A block. The table `blocks` has one entry per granule; a block uses the entry of its first granule. The table is
 * reserved address space: only the pages that are accessed take memory. */
struct emu_heap_block {
  uint32_t size; /* in granules */
  uint32_t live;
  union {
    struct {
      uint32_t previous, next; /* free block: first granules of its neighbors in the free list */
    };
    uint64_t bytes; /* live block: requested bytes */
  };
};

#define NONE UINT32_MAX
#define GIVE_BACK ((uint64_t)1 << 20) /* bytes from which a freed block returns its pages to the operating system */

static void start_set(emu_heap *heap, uint32_t granule) {
  for (uint32_t level = 0; level < heap->levels; level++) {
    heap->starts[level][granule / 64] |= (uint64_t)1 << granule % 64;
    granule /= 64;
  }
}

static void start_clear(emu_heap *heap, uint32_t granule) {
  for (uint32_t level = 0; level < heap->levels; level++) {
    if (heap->starts[level][granule / 64] &= ~((uint64_t)1 << granule % 64))
      return;
    granule /= 64;
  }
}

/* Returns the first granule of the block that contains `granule`. Blocks, free ones included, cover the whole range. */
static uint32_t start_of(const emu_heap *heap, uint32_t granule) {
  uint64_t below = (uint64_t)2 << granule % 64;
  uint64_t word = heap->starts[0][granule / 64] & (below - 1);
  if (word)
    return granule / 64 * 64 + 63 - (uint32_t)__builtin_clzll(word);
  uint32_t level = 0, index = granule / 64;
  do {
    level++;
    word = heap->starts[level][index / 64] & (((uint64_t)1 << index % 64) - 1);
    index /= 64;
  } while (!word);
  while (true) {
    index = index * 64 + 63 - (uint32_t)__builtin_clzll(word);
    if (level == 0)
      return index;
    word = heap->starts[--level][index];
  }
}

/* Returns the class of a size in granules. Every block of a class is larger than the blocks of lower classes. */
static uint32_t bin_of(uint32_t size) {
  if (size < 8)
    return size;
  uint32_t log = 31 - (uint32_t)__builtin_clz(size);
  return (log - 2) * 8 + (size >> (log - 3) & 7);
}

static void list_add(emu_heap *heap, uint32_t index) {
  emu_heap_block *block = &heap->blocks[index];
  uint32_t bin = bin_of(block->size);
  block->live = 0;
  block->previous = NONE;
  block->next = heap->bins[bin];
  if (block->next != NONE)
    heap->blocks[block->next].previous = index;
  heap->bins[bin] = index;
  heap->bin_mask[bin / 64] |= (uint64_t)1 << bin % 64;
}

static void list_remove(emu_heap *heap, uint32_t index) {
  emu_heap_block *block = &heap->blocks[index];
  uint32_t bin = bin_of(block->size);
  if (block->next != NONE)
    heap->blocks[block->next].previous = block->previous;
  if (block->previous != NONE)
    heap->blocks[block->previous].next = block->next;
  else
    heap->bins[bin] = block->next;
  if (heap->bins[bin] == NONE)
    heap->bin_mask[bin / 64] &= ~((uint64_t)1 << bin % 64);
}

/* Finds a free block of at least `size` granules: any block of a higher class, else one of the same class that is large
 * enough. */
static uint32_t list_find(const emu_heap *heap, uint32_t size) {
  uint32_t bin = bin_of(size);
  if (size < 8 && heap->bins[bin] != NONE) /* below 8 granules a class holds blocks of one size */
    return heap->bins[bin];
  for (uint32_t above = bin + 1; above < EMU_HEAP_BINS; above = (above | 63) + 1) {
    uint64_t word = heap->bin_mask[above / 64] & ~(((uint64_t)1 << above % 64) - 1);
    if (word)
      return heap->bins[above / 64 * 64 + (uint32_t)__builtin_ctzll(word)];
  }
  for (uint32_t index = heap->bins[bin]; index != NONE; index = heap->blocks[index].next)
    if (heap->blocks[index].size >= size)
      return index;
  return NONE;
}

int emu_heap_init(emu_heap *heap, uint64_t base, ptrdiff_t alias, uint64_t bytes, uint64_t capacity, uint32_t redzone) {
  uint64_t granules = bytes / EMU_GRANULE;
  uint64_t words[EMU_HEAP_LEVELS];
  uint64_t total = granules * sizeof(emu_heap_block);
  heap->levels = 0;
  for (uint64_t bits = granules; heap->levels < EMU_HEAP_LEVELS; bits = words[heap->levels++]) {
    words[heap->levels] = (bits + 63) / 64;
    total += words[heap->levels] * sizeof(uint64_t);
    if (bits <= 64) {
      heap->levels++;
      break;
    }
  }
  void *tables = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (tables == MAP_FAILED)
    return -1;
  heap->tables = tables;
  heap->tables_bytes = total;
  heap->blocks = tables;
  uint64_t *next = (uint64_t *)(heap->blocks + granules);
  for (uint32_t level = 0; level < heap->levels; level++) {
    heap->starts[level] = next;
    next += words[level];
  }
  pthread_mutex_init(&heap->lock, NULL);
  heap->base = base;
  heap->alias = alias;
  heap->bytes = bytes;
  heap->capacity = capacity;
  heap->used = 0;
  heap->redzone = redzone;
  for (uint32_t bin = 0; bin < EMU_HEAP_BINS; bin++)
    heap->bins[bin] = NONE;
  for (uint32_t word = 0; word < EMU_HEAP_BINS / 64; word++)
    heap->bin_mask[word] = 0;
  heap->blocks[0].size = (uint32_t)granules;
  start_set(heap, 0);
  list_add(heap, 0);
  return 0;
}

void emu_heap_destroy(emu_heap *heap) {
  munmap(heap->tables, heap->tables_bytes);
  pthread_mutex_destroy(&heap->lock);
  *heap = (emu_heap){0};
}

uint64_t emu_heap_alloc(emu_heap *heap, uint64_t bytes) {
  if (bytes > heap->capacity)
    return 0;
  uint32_t size = (uint32_t)((bytes + heap->redzone + EMU_GRANULE - 1) / EMU_GRANULE);
  uint64_t address = 0;
  pthread_mutex_lock(&heap->lock);
  uint32_t index = (uint64_t)size * EMU_GRANULE <= heap->capacity - heap->used ? list_find(heap, size) : NONE;
  if (index != NONE) {
    list_remove(heap, index);
    emu_heap_block *block = &heap->blocks[index];
    if (block->size > size) {
      uint32_t rest = index + size;
      heap->blocks[rest].size = block->size - size;
      start_set(heap, rest);
      list_add(heap, rest);
      block->size = size;
    }
    block->live = 1;
    block->bytes = bytes;
    heap->used += (uint64_t)size * EMU_GRANULE;
    address = heap->base + (uint64_t)index * EMU_GRANULE;
  }
  pthread_mutex_unlock(&heap->lock);
  return address;
}

bool emu_heap_free(emu_heap *heap, uint64_t address) {
  uint64_t offset = address - heap->base;
  if (offset >= heap->bytes || offset % EMU_GRANULE)
    return false;
  uint32_t index = (uint32_t)(offset / EMU_GRANULE);
  pthread_mutex_lock(&heap->lock);
  emu_heap_block *block = &heap->blocks[index];
  if (start_of(heap, index) != index || !block->live) {
    pthread_mutex_unlock(&heap->lock);
    return false;
  }
  uint64_t freed = (uint64_t)block->size * EMU_GRANULE;
  heap->used -= freed;
  if (freed >= GIVE_BACK) { /* under the lock, so that no other thread allocates the range meanwhile */
    uint64_t first = (address + (uint64_t)heap->alias + 4095) & ~(uint64_t)4095;
    uint64_t last = (address + (uint64_t)heap->alias + freed) & ~(uint64_t)4095;
    madvise((void *)first, last - first, MADV_DONTNEED);
  }
  uint64_t after = (uint64_t)index + block->size;
  if (after * EMU_GRANULE < heap->bytes && !heap->blocks[after].live) {
    list_remove(heap, (uint32_t)after);
    start_clear(heap, (uint32_t)after);
    block->size += heap->blocks[after].size;
  }
  if (index > 0) {
    uint32_t before = start_of(heap, index - 1);
    if (!heap->blocks[before].live) {
      list_remove(heap, before);
      start_clear(heap, index);
      heap->blocks[before].size += block->size;
      index = before;
    }
  }
  list_add(heap, index);
  pthread_mutex_unlock(&heap->lock);
  return true;
}

bool emu_heap_find(emu_heap *heap, uint64_t address, uint64_t bytes, uint64_t *start, uint64_t *size) {
  uint64_t offset = address - heap->base;
  if (offset >= heap->bytes)
    return false;
  pthread_mutex_lock(&heap->lock);
  uint32_t index = start_of(heap, (uint32_t)(offset / EMU_GRANULE));
  const emu_heap_block *block = &heap->blocks[index];
  bool live = block->live;
  uint64_t held = live ? block->bytes : 0;
  pthread_mutex_unlock(&heap->lock);
  uint64_t within = offset - (uint64_t)index * EMU_GRANULE;
  if (!live || within > held || bytes > held - within)
    return false;
  if (start)
    *start = heap->base + (uint64_t)index * EMU_GRANULE;
  if (size)
    *size = held;
  return true;
}

uint64_t emu_heap_held(emu_heap *heap, uint64_t address) {
  pthread_mutex_lock(&heap->lock);
  uint64_t held = (uint64_t)heap->blocks[(address - heap->base) / EMU_GRANULE].size * EMU_GRANULE;
  pthread_mutex_unlock(&heap->lock);
  return held;
}

bool emu_heap_around(emu_heap *heap, uint64_t address, uint64_t *start, uint64_t *size) {
  uint64_t offset = address - heap->base;
  if (offset >= heap->bytes)
    return false;
  pthread_mutex_lock(&heap->lock);
  uint32_t index = start_of(heap, (uint32_t)(offset / EMU_GRANULE));
  if (!heap->blocks[index].live && index > 0)
    index = start_of(heap, index - 1);
  bool live = heap->blocks[index].live;
  *start = heap->base + (uint64_t)index * EMU_GRANULE;
  *size = live ? heap->blocks[index].bytes : 0;
  pthread_mutex_unlock(&heap->lock);
  return live;
}

void emu_heap_visit(emu_heap *heap, void (*visit)(void *context, uint64_t address, uint64_t bytes), void *context) {
  pthread_mutex_lock(&heap->lock);
  for (uint64_t index = 0; index * EMU_GRANULE < heap->bytes; index += heap->blocks[index].size)
    if (heap->blocks[index].live)
      visit(context, heap->base + index * EMU_GRANULE, heap->blocks[index].bytes);
  pthread_mutex_unlock(&heap->lock);
}
