#include "emulator/external/external_memory.h"

#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "emulator/external/mapping.h"
#include "emulator/state.h"
#include "emulator/work/capture.h"
#include "emulator/work/timeline.h"

struct CUextMemory_st {
  struct CUextMemory_st *next;
  emu_device *device;
  int fd; /* owned */
  uint64_t bytes;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards the list */
static struct CUextMemory_st *memories;

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

CUresult emu_external_memory_get_mapped_buffer(CUdeviceptr *address, CUexternalMemory memory,
                                               const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *desc) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (result || (result = emu_capture_unsafe()))
    return result;
  if (!address || !desc || desc->flags || desc->size == 0)
    return CUDA_ERROR_INVALID_VALUE;
  pthread_mutex_lock(&lock);
  if (!*link_of(memory))
    result = emu_fail(CUDA_ERROR_INVALID_HANDLE, "%p is not external memory", (void *)memory);
  else if (desc->offset > memory->bytes || desc->size > memory->bytes - desc->offset)
    result = emu_fail(CUDA_ERROR_INVALID_VALUE,
                      "a buffer of %llu bytes at offset %llu does not fit into %llu bytes of external memory",
                      desc->size, desc->offset, (unsigned long long)memory->bytes);
  else
    result = emu_mapping_make(
        memory->device,
        &(emu_file_range){.fd = memory->fd, .offset = desc->offset, .bytes = desc->size, .what = "external memory"},
        EMU_MAPPING_BUFFER, address);
  if (!result)
    atomic_fetch_add(&emu.live, 1);
  pthread_mutex_unlock(&lock);
  return result;
}

/* Buffers that are mapped from the memory stay valid until cuMemFree. (On a GPU they may no longer be used.) */
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
