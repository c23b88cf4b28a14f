#include "emulator/external/mapping.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "emulator/heap.h"
#include "emulator/host/cpu.h"
#include "emulator/shadow.h"

typedef struct mapping {
  struct mapping *next;
  emu_device *device;
  emu_mapping_kind kind;
  CUdeviceptr address;    /* 0: unmapped by the program */
  uint64_t bytes;         /* of the range */
  uint64_t block;         /* block of the heap that contains the pages */
  uint64_t pages, length; /* device address and length of the mapped pages */
} mapping;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards the list */
static mapping *mappings;

static uint64_t round_up(uint64_t bytes) { return (bytes + EMU_PAGE - 1) / EMU_PAGE * EMU_PAGE; }

/* Replaces the pages of the file by empty memory. */
static bool replace_pages(const mapping *unmapped) {
  void *pages = (void *)(unmapped->pages + (uint64_t)emu.alias);
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  return mmap(pages, unmapped->length, PROT_READ | PROT_WRITE, flags, -1, 0) != MAP_FAILED;
}

/* Unmaps the pages of the mappings without an address, and frees their addresses. The pages go back at once, even if
 * the checking mode keeps the addresses in quarantine. If the system cannot replace the pages, the mapping stays in the
 * list: other work must not write into the file. The caller holds the lock. */
static void unmap_freed(void) {
  for (mapping **link = &mappings; *link;) {
    mapping *freed = *link;
    if (freed->address || !replace_pages(freed)) {
      link = &freed->next;
      continue;
    }
    *link = freed->next;
    if (!emu.config.check || !emu_shadow_free(freed->device, freed->block, freed->length + EMU_PAGE))
      emu_heap_free(&freed->device->heap, freed->block);
    free(freed);
  }
}

/* Maps the range of the file; the caller holds the lock. */
static CUresult map(mapping *made, const emu_file_range *range) {
  emu_device *device = made->device;
  const uint64_t first = range->offset / EMU_PAGE * EMU_PAGE;
  made->bytes = range->bytes;
  made->length = round_up(range->offset + range->bytes - first);
  /* A block is only aligned to granules, and its first and last page may belong to neighbors, too. */
  made->block = emu_heap_alloc(&device->heap, made->length + EMU_PAGE);
  if (!made->block && emu_shadow_flush(device))
    made->block = emu_heap_alloc(&device->heap, made->length + EMU_PAGE);
  if (!made->block)
    return emu_fail(CUDA_ERROR_OUT_OF_MEMORY, "no room for %llu bytes of %s on emulated device %d",
                    (unsigned long long)range->bytes, range->what, device->ordinal);
  made->pages = round_up(made->block);
  made->address = made->pages + (range->offset - first);
  if (mmap((void *)(made->pages + (uint64_t)emu.alias), made->length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
           range->fd, (off_t)first) != MAP_FAILED) {
    emu_shadow_imported(made->address, range->bytes);
    return CUDA_SUCCESS;
  }
  const bool is_full = errno == ENOMEM;
  emu_heap_free(&device->heap, made->block);
  if (is_full)
    return CUDA_ERROR_OUT_OF_MEMORY;
  return emu_fail(CUDA_ERROR_INVALID_HANDLE,
                  "%s: file descriptor %d cannot be mapped for reading and writing. Open it for both", range->what,
                  range->fd);
}

CUresult emu_mapping_make(emu_device *device, const emu_file_range *range, emu_mapping_kind kind,
                          CUdeviceptr *address) {
  mapping *made = calloc(1, sizeof *made);
  if (!made)
    return CUDA_ERROR_OUT_OF_MEMORY;
  made->device = device;
  made->kind = kind;
  pthread_mutex_lock(&lock);
  unmap_freed();
  const CUresult result = map(made, range);
  if (!result) {
    made->next = mappings;
    mappings = made;
    *address = made->address;
  }
  pthread_mutex_unlock(&lock);
  if (result)
    free(made);
  return result;
}

bool emu_mapping_end(CUdeviceptr address, emu_mapping_kind kind) {
  pthread_mutex_lock(&lock);
  mapping *found = address ? mappings : NULL;
  while (found && (found->address != address || found->kind != kind))
    found = found->next;
  if (found)
    found->address = 0;
  unmap_freed();
  pthread_mutex_unlock(&lock);
  return found != NULL;
}

bool emu_mapping_find(CUdeviceptr address, CUdeviceptr *start, uint64_t *bytes) {
  pthread_mutex_lock(&lock);
  const mapping *found = mappings;
  while (found && (!found->address || address - found->address >= found->bytes))
    found = found->next;
  if (found) {
    *start = found->address;
    *bytes = found->bytes;
  }
  pthread_mutex_unlock(&lock);
  return found != NULL;
}
