#include "emulator/external/external_memory.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "emulator/heap.h"
#include "emulator/shadow.h"
#include "emulator/state.h"
#include "emulator/work/capture.h"
#include "emulator/work/timeline.h"

#define PAGE 4096u

struct CUextMemory_st {
  struct CUextMemory_st *next;
  emu_device *device;
  int fd; /* owned */
  uint64_t bytes;
};

typedef struct buffer {
  struct buffer *next;
  emu_device *device;
  CUdeviceptr address;     /* 0: freed */
  uint64_t block;          /* block of the heap that contains the mapping */
  uint64_t mapping, bytes; /* device address and length of the mapped pages */
} buffer;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards both lists */
static struct CUextMemory_st *memories;
static buffer *buffers;

static uint64_t round_up(uint64_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

CUresult emu_import_external_memory(CUexternalMemory *memory, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *desc) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (result || (result = emu_capture_unsafe()))
    return result;
  if (!memory || !desc || desc->flags || desc->size == 0)
    return CUDA_ERROR_INVALID_VALUE;
  if (desc->type != CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD)
    return emu_fail(CUDA_ERROR_NOT_SUPPORTED, "handle type %d of external memory is not emulated", desc->type);
  result = emu_check_shared_file(desc->handle.fd, desc->size, "external memory");
  if (result)
    return result;
  struct CUextMemory_st *made = calloc(1, sizeof *made);
  if (!made)
    return CUDA_ERROR_OUT_OF_MEMORY;
  *made = (struct CUextMemory_st){.device = device, .fd = desc->handle.fd, .bytes = desc->size};
  pthread_mutex_lock(&lock);
  made->next = memories;
  memories = made;
  pthread_mutex_unlock(&lock);
  atomic_fetch_add(&emu.live, 1);
  *memory = made;
  return CUDA_SUCCESS;
}

/* Returns the link to the memory; the last link, to NULL, if it is not alive. The caller holds the lock. */
static struct CUextMemory_st **link_of(CUexternalMemory memory) {
  struct CUextMemory_st **link = &memories;
  while (*link && *link != memory)
    link = &(*link)->next;
  return link;
}

/* Replaces the pages of the file by empty memory. */
static bool replace_pages(const buffer *unmapped) {
  void *pages = (void *)(unmapped->mapping + (uint64_t)emu.alias);
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  return mmap(pages, unmapped->bytes, PROT_READ | PROT_WRITE, flags, -1, 0) != MAP_FAILED;
}

/* Unmaps the pages of the buffers without an address, and frees their addresses. The pages go back at once, even if the
 * checking mode keeps the addresses in quarantine. If the system cannot replace the pages, the buffer stays in the
 * list: other work must not write into the file. The caller holds the lock. */
static void unmap_freed(void) {
  for (buffer **link = &buffers; *link;) {
    buffer *freed = *link;
    if (freed->address || !replace_pages(freed)) {
      link = &freed->next;
      continue;
    }
    *link = freed->next;
    if (!emu.config.check || !emu_shadow_free(freed->device, freed->block, freed->bytes + PAGE))
      emu_heap_free(&freed->device->heap, freed->block);
    free(freed);
  }
}

/* Maps the range of the file; the caller holds the lock. */
static CUresult map(buffer *made, const struct CUextMemory_st *memory, uint64_t offset, uint64_t bytes) {
  emu_device *device = memory->device;
  const uint64_t first = offset / PAGE * PAGE;
  made->device = device;
  made->bytes = round_up(offset + bytes - first);
  /* A block is only aligned to granules, and its first and last page may belong to neighbours, too. */
  made->block = emu_heap_alloc(&device->heap, made->bytes + PAGE);
  if (!made->block && emu_shadow_flush(device))
    made->block = emu_heap_alloc(&device->heap, made->bytes + PAGE);
  if (!made->block)
    return emu_fail(CUDA_ERROR_OUT_OF_MEMORY, "no room for %llu bytes of external memory on emulated device %d",
                    (unsigned long long)bytes, device->ordinal);
  made->mapping = round_up(made->block);
  made->address = made->mapping + (offset - first);
  if (mmap((void *)(made->mapping + (uint64_t)emu.alias), made->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
           memory->fd, (off_t)first) != MAP_FAILED) {
    emu_shadow_imported(made->address, bytes);
    return CUDA_SUCCESS;
  }
  const bool is_full = errno == ENOMEM;
  emu_heap_free(&device->heap, made->block);
  if (is_full)
    return CUDA_ERROR_OUT_OF_MEMORY;
  return emu_fail(CUDA_ERROR_INVALID_HANDLE,
                  "external memory: file descriptor %d cannot be mapped for reading and writing. Open it for both",
                  memory->fd);
}

CUresult emu_external_memory_get_mapped_buffer(CUdeviceptr *address, CUexternalMemory memory,
                                               const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *desc) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (result || (result = emu_capture_unsafe()))
    return result;
  if (!address || !desc || desc->flags || desc->size == 0)
    return CUDA_ERROR_INVALID_VALUE;
  buffer *made = calloc(1, sizeof *made);
  if (!made)
    return CUDA_ERROR_OUT_OF_MEMORY;
  pthread_mutex_lock(&lock);
  unmap_freed();
  if (!*link_of(memory))
    result = emu_fail(CUDA_ERROR_INVALID_HANDLE, "%p is not external memory", (void *)memory);
  else if (desc->offset > memory->bytes || desc->size > memory->bytes - desc->offset)
    result = emu_fail(CUDA_ERROR_INVALID_VALUE,
                      "a buffer of %llu bytes at offset %llu does not fit into %llu bytes of external memory",
                      desc->size, desc->offset, (unsigned long long)memory->bytes);
  else
    result = map(made, memory, desc->offset, desc->size);
  if (!result) {
    made->next = buffers;
    buffers = made;
    *address = made->address;
    atomic_fetch_add(&emu.live, 1);
  }
  pthread_mutex_unlock(&lock);
  if (result)
    free(made);
  return result;
}

bool emu_external_memory_unmap(CUdeviceptr address) {
  pthread_mutex_lock(&lock);
  buffer *found = address ? buffers : NULL;
  while (found && found->address != address)
    found = found->next;
  if (found)
    found->address = 0;
  unmap_freed();
  pthread_mutex_unlock(&lock);
  return found != NULL;
}

/* Buffers that are mapped from the memory stay valid until cuMemFree. */
CUresult emu_destroy_external_memory(CUexternalMemory memory) {
  CUresult result = emu_leave();
  if (result || (result = emu_capture_unsafe()))
    return result;
  pthread_mutex_lock(&lock);
  struct CUextMemory_st **link = link_of(memory);
  const bool found = *link != NULL;
  if (found)
    *link = memory->next;
  pthread_mutex_unlock(&lock);
  if (!found)
    return emu_fail(CUDA_ERROR_INVALID_HANDLE, "%p is not external memory", (void *)memory);
  close(memory->fd);
  free(memory);
  atomic_fetch_sub(&emu.live, 1);
  return emu_lost();
}
