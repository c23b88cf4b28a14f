#define _GNU_SOURCE /* F_ADD_SEALS */
#include "emulator/work/timeline.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "emulator/state.h"

typedef struct shared_counter {
  char magic[8];
  _Atomic uint64_t value;
} shared_counter;
_Static_assert(sizeof(shared_counter) == EMU_TIMELINE_BYTES, "the layout that timeline.h describes");

struct emu_timeline {
  const char *name; /* for errors */
  atomic_uint references;
  shared_counter *counter;
};

CUresult emu_check_shared_file(int fd, uint64_t least, const char *what) {
  struct stat file;
  if (fstat(fd, &file))
    return emu_fail(CUDA_ERROR_INVALID_HANDLE, "%s: file descriptor %d is not open", what, fd);
  const int seals = S_ISREG(file.st_mode) ? fcntl(fd, F_GET_SEALS) : -1;
  if (seals < 0)
    return emu_fail(CUDA_ERROR_INVALID_HANDLE,
                    "%s: file descriptor %d is not a file in memory. The emulated device imports files that "
                    "memfd_create has made",
                    what, fd);
  if (!(seals & F_SEAL_SHRINK) && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK))
    return emu_fail(CUDA_ERROR_INVALID_HANDLE,
                    "%s: the file of file descriptor %d may shrink. Create it with MFD_ALLOW_SEALING, so that the "
                    "emulated device can prevent that",
                    what, fd);
  /* The size was read before the file was sealed. */
  if (fstat(fd, &file) || (uint64_t)file.st_size < least)
    return emu_fail(CUDA_ERROR_INVALID_VALUE,
                    "%s: the file of file descriptor %d has %lld bytes, expected %llu or more", what, fd,
                    (long long)file.st_size, (unsigned long long)least);
  return CUDA_SUCCESS;
}

CUresult emu_timeline_map(int fd, const char *what, emu_timeline **out) {
  const CUresult result = emu_check_shared_file(fd, EMU_TIMELINE_BYTES, what);
  if (result)
    return result;
  emu_timeline *timeline = calloc(1, sizeof *timeline);
  if (!timeline)
    return CUDA_ERROR_OUT_OF_MEMORY;
  void *mapped = mmap(NULL, EMU_TIMELINE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (mapped == MAP_FAILED) {
    const bool is_full = errno == ENOMEM;
    free(timeline);
    if (is_full)
      return CUDA_ERROR_OUT_OF_MEMORY;
    return emu_fail(CUDA_ERROR_INVALID_HANDLE, "%s: file descriptor %d cannot be mapped for reading and writing", what,
                    fd);
  }
  timeline->counter = mapped;
  timeline->name = what;
  atomic_init(&timeline->references, 1);
  if (memcmp(timeline->counter->magic, EMU_TIMELINE_MAGIC, sizeof timeline->counter->magic) == 0) {
    *out = timeline;
    return CUDA_SUCCESS;
  }
  emu_timeline_release(timeline);
  return emu_fail(CUDA_ERROR_INVALID_HANDLE,
                  "%s: the file of file descriptor %d does not begin with \"" EMU_TIMELINE_MAGIC
                  "\". docs/external_resources.md describes the emulated device's semaphores",
                  what, fd);
}

emu_timeline *emu_timeline_share(emu_timeline *timeline) {
  atomic_fetch_add(&timeline->references, 1);
  return timeline;
}

void emu_timeline_release(emu_timeline *timeline) {
  if (!timeline || atomic_fetch_sub(&timeline->references, 1) != 1)
    return;
  munmap(timeline->counter, EMU_TIMELINE_BYTES);
  free(timeline);
}

bool emu_timeline_is_used(const emu_timeline *timeline) { return atomic_load(&timeline->references) > 1; }

const char *emu_timeline_name(const emu_timeline *timeline) { return timeline->name; }

uint64_t emu_timeline_value(const emu_timeline *timeline) { return atomic_load(&timeline->counter->value); }

void emu_timeline_signal(emu_timeline *timeline, uint64_t value) {
  uint64_t before = atomic_load(&timeline->counter->value);
  while (before < value && !atomic_compare_exchange_weak(&timeline->counter->value, &before, value)) {
  }
}
