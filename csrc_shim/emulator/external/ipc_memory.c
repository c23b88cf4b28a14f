#define _GNU_SOURCE /* fallocate */
#include "emulator/external/ipc_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "emulator/external/ipc_handle.h"
#include "emulator/external/mapping.h"
#include "emulator/external/pause.h"
#include "emulator/heap.h"
#include "emulator/host/cpu.h"
#include "emulator/mempool.h"
#include "emulator/state.h"
#include "emulator/work/capture.h"
#include "emulator/work/timeline.h"

#define MAX_BYTES ((uint64_t)1 << 48)
#define WHAT "CUDA IPC memory"

typedef struct record {
  emu_ipc_header header;
  uint64_t offset, bytes; /* of the allocation, in the file of its device's pages */
  int32_t pages, ordinal; /* the exporter's descriptor of that file; the device */
} record;

static const emu_ipc_kind kind = {.what = WHAT, .magic = "ocp-ipcm", .bytes = sizeof(record), .access = O_RDONLY};

typedef struct exported {
  struct exported *next;
  emu_device *device;
  uint64_t address, bytes;
  int fd; /* of the record; owned */
  CUipcMemHandle handle;
} exported;

typedef struct opened {
  struct opened *next;
  CUdeviceptr address;
  uint64_t secret;
  int fd; /* of the record, which it locks; owned */
  unsigned count;
} opened;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards all below; taken before the list of streams */
static exported *exports;
static opened *openings;
static struct {
  int fd; /* a file for the pages of all exports of a device, at their offsets in its memory; 0: not made yet */
  uint64_t bytes;
} files[EMU_MAX_DEVICES];

/* ---- exporting ---- */

/* Pages, as device addresses. */
typedef struct page_range {
  uint64_t first, end;
} page_range;

/* Returns the pages of an allocation that are in no other exported allocation. */
static page_range own_pages(uint64_t address, uint64_t bytes) {
  page_range own = {address / EMU_PAGE * EMU_PAGE, (address + bytes + EMU_PAGE - 1) / EMU_PAGE * EMU_PAGE};
  for (const exported *other = exports; other; other = other->next) {
    const uint64_t first = other->address / EMU_PAGE * EMU_PAGE,
                   end = (other->address + other->bytes + EMU_PAGE - 1) / EMU_PAGE * EMU_PAGE;
    if (other->address < address && end > own.first)
      own.first = end;
    if (other->address > address && first < own.end)
      own.end = first;
  }
  return own;
}

static CUresult fail_system(const char *what) {
  return emu_fail(CUDA_ERROR_OUT_OF_MEMORY, WHAT ": %s: %s", what, strerror(errno));
}

/* Makes the device's file, and makes it large enough. */
static CUresult make_file(const emu_device *device, uint64_t bytes) {
  struct rlimit limit;
  if (!files[device->ordinal].fd) {
    int fd;
    const CUresult result = emu_ipc_make_file(&fd);
    if (result)
      return result;
    files[device->ordinal].fd = fd;
  }
  if (bytes <= files[device->ordinal].bytes)
    return CUDA_SUCCESS;
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < bytes) /* a larger file would kill the process */
    return emu_fail(CUDA_ERROR_OUT_OF_MEMORY,
                    WHAT ": a file in memory of %llu bytes is needed, but ulimit -f allows %llu. Raise that limit",
                    (unsigned long long)bytes, (unsigned long long)limit.rlim_cur);
  if (ftruncate(files[device->ordinal].fd, (off_t)bytes))
    return fail_system("the file in memory cannot grow");
  files[device->ordinal].bytes = bytes;
  return CUDA_SUCCESS;
}

static CUresult write_all(int fd, const char *from, uint64_t bytes, uint64_t offset) {
  while (bytes) {
    const ssize_t done = pwrite(fd, from, bytes, (off_t)offset);
    if (done < 0 && errno == EINTR)
      continue;
    if (done <= 0)
      return fail_system("the memory cannot be copied into a file");
    from += done;
    offset += (uint64_t)done;
    bytes -= (uint64_t)done;
  }
  return CUDA_SUCCESS;
}

/* Moves the pages into the device's file. No work of any stream runs meanwhile, so no write is lost. */
static CUresult share_pages(const emu_device *device, page_range pages) {
  const uint64_t offset = pages.first - device->heap.base;
  char *contents = (char *)(pages.first + (uint64_t)emu.alias);
  if (pages.first >= pages.end)
    return CUDA_SUCCESS;
  CUresult result = make_file(device, offset + (pages.end - pages.first));
  if (result)
    return result;
  const int fd = files[device->ordinal].fd;
  emu_pause();
  result = write_all(fd, contents, pages.end - pages.first, offset);
  if (!result && mmap(contents, pages.end - pages.first, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd,
                      (off_t)offset) == MAP_FAILED)
    result = fail_system("the pages of the memory cannot be mapped");
  emu_resume();
  return result;
}

/* Makes the pages private again. Keeps the contents of the first and the last page, in which other allocations
 * may have bytes. */
static CUresult unshare_pages(const emu_device *device, page_range pages) {
  const uint64_t bytes = pages.end - pages.first;
  char *contents = (char *)(pages.first + (uint64_t)emu.alias);
  char first[EMU_PAGE], last[EMU_PAGE];
  CUresult result = CUDA_SUCCESS;
  if (pages.first >= pages.end)
    return CUDA_SUCCESS;
  emu_pause();
  memcpy(first, contents, EMU_PAGE);
  memcpy(last, contents + bytes - EMU_PAGE, EMU_PAGE);
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  if (mmap(contents, bytes, PROT_READ | PROT_WRITE, flags, -1, 0) == MAP_FAILED) {
    result = fail_system("the pages of the memory cannot be mapped");
  } else {
    memcpy(contents, first, EMU_PAGE);
    memcpy(contents + bytes - EMU_PAGE, last, EMU_PAGE);
  }
  emu_resume();
  if (!result) /* gives the file's memory back; if that fails, the file keeps the memory, which is harmless */
    (void)fallocate(files[device->ordinal].fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                    (off_t)(pages.first - device->heap.base), (off_t)bytes);
  return result;
}

/* Returns the link to the export of the allocation; the last link, to NULL, if it has none. The caller holds the lock.
 */
static exported **export_of(CUdeviceptr address) {
  exported **link = &exports;
  while (*link && (*link)->address != address)
    link = &(*link)->next;
  return link;
}

static CUresult make_export(exported *made) {
  emu_device *device = made->device;
  const page_range pages = own_pages(made->address, made->bytes);
  CUresult result = share_pages(device, pages);
  if (result)
    return result;
  record record = {.offset = made->address - device->heap.base,
                   .bytes = made->bytes,
                   .pages = files[device->ordinal].fd,
                   .ordinal = device->ordinal};
  result = emu_ipc_export(&kind, &record.header, &made->fd, made->handle.reserved);
  if (result)
    unshare_pages(device, pages); /* if this fails, the pages stay in the file, where they work as well */
  return result;
}

CUresult emu_ipc_get_mem_handle(CUipcMemHandle *handle, CUdeviceptr address) {
  emu_device *device;
  CUdeviceptr start = 0;
  uint64_t bytes = 0;
  CUresult result = emu_enter(&device);
  if (result || (result = emu_capture_unsafe()))
    return result;
  if (!handle)
    return CUDA_ERROR_INVALID_VALUE;
  if (emu_mapping_find(address, &start, &bytes))
    return emu_fail(CUDA_ERROR_INVALID_VALUE, WHAT ": 0x%llx is memory of another process or API",
                    (unsigned long long)address);
  if (!emu_is_device_address(address) || !emu_heap_find(&emu_device_of(address)->heap, address, 1, &start, &bytes) ||
      start != address)
    return emu_fail(CUDA_ERROR_INVALID_VALUE, WHAT ": no allocation starts at 0x%llx", (unsigned long long)address);
  if (emu_mempool_owns(address))
    return emu_fail(CUDA_ERROR_INVALID_VALUE, WHAT ": the memory at 0x%llx is of a memory pool, expected cuMemAlloc's",
                    (unsigned long long)address);
  pthread_mutex_lock(&lock);
  exported *made = *export_of(address);
  if (made) {
    *handle = made->handle;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
  }
  made = calloc(1, sizeof *made);
  if (made) {
    *made = (exported){.device = emu_device_of(address), .address = address, .bytes = bytes};
    result = make_export(made);
  }
  if (made && !result) {
    *handle = made->handle;
    made->next = exports;
    exports = made;
  }
  pthread_mutex_unlock(&lock);
  if (result)
    free(made);
  return made ? result : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult emu_ipc_memory_end_export(CUdeviceptr address) {
  CUresult result = CUDA_SUCCESS;
  pthread_mutex_lock(&lock);
  exported **link = export_of(address), *ended = *link;
  if (ended && emu_ipc_is_open(ended->fd)) {
    result = emu_fail(EMU_ERROR_ILLEGAL_STATE,
                      WHAT ": another process still has the memory at 0x%llx open. Free it after that process has "
                           "closed its handle",
                      (unsigned long long)address);
  } else if (ended) {
    *link = ended->next;
    result = unshare_pages(ended->device, own_pages(ended->address, ended->bytes));
    if (result) {
      ended->next = exports;
      exports = ended;
    } else {
      close(ended->fd);
      free(ended);
    }
  }
  pthread_mutex_unlock(&lock);
  return result;
}

/* ---- importing ---- */

/* Maps the exported memory. `made` has the descriptor of the record. */
static CUresult map(opened *made, const record *record, int process, emu_device *current) {
  int pages;
  if (record->ordinal < 0 || record->ordinal >= (int)emu.config.num_devices)
    return emu_fail(CUDA_ERROR_INVALID_DEVICE,
                    WHAT ": the memory is on emulated device %d, but this process has %u emulated devices. Raise "
                         "ORT_CUDA_PLUGIN_EMULATE_DEVICES",
                    record->ordinal, emu.config.num_devices);
  CUresult result = emu_ipc_open(process, record->pages, O_RDWR, WHAT, &pages);
  if (result)
    return result;
  emu_device *owner = &emu.devices[record->ordinal];
  uint64_t end = 0;
  if (record->bytes == 0 || record->offset > MAX_BYTES || record->bytes > MAX_BYTES)
    result = emu_fail(CUDA_ERROR_INVALID_HANDLE, WHAT ": the record of the handle is damaged");
  else
    end = (record->offset + record->bytes + EMU_PAGE - 1) / EMU_PAGE * EMU_PAGE;
  if (!result && !(result = emu_check_shared_file(pages, end, WHAT)))
    result = emu_mapping_make(
        owner, &(emu_file_range){.fd = pages, .offset = record->offset, .bytes = record->bytes, .what = WHAT},
        EMU_MAPPING_IPC, &made->address);
  close(pages); /* the mapping keeps the file */
  if (!result && owner != current)
    atomic_fetch_or(&current->peers, 1u << owner->ordinal);
  return result;
}

static CUresult open_new(const CUipcMemHandle *handle, emu_device *current, opened **out) {
  record record;
  int process = 0;
  opened *made = calloc(1, sizeof *made);
  if (!made)
    return CUDA_ERROR_OUT_OF_MEMORY;
  CUresult result = emu_ipc_import(&kind, handle->reserved, &record.header, &made->fd, &process);
  if (!result && (result = map(made, &record, process, current)))
    close(made->fd);
  if (result) {
    free(made);
    return result;
  }
  made->secret = record.header.secret;
  made->next = openings;
  openings = made;
  atomic_fetch_add(&emu.live, 1);
  *out = made;
  return CUDA_SUCCESS;
}

CUresult emu_ipc_open_mem_handle(CUdeviceptr *address, CUipcMemHandle handle, unsigned flags) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (result || (result = emu_capture_unsafe()))
    return result;
  if (!address || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
    return CUDA_ERROR_INVALID_VALUE;
  pthread_mutex_lock(&lock);
  opened *found = openings;
  while (found && found->secret != emu_ipc_secret(handle.reserved))
    found = found->next;
  if (!found)
    result = open_new(&handle, device, &found);
  if (!result) {
    found->count++;
    *address = found->address;
  }
  pthread_mutex_unlock(&lock);
  return result;
}

CUresult emu_ipc_close_mem_handle(CUdeviceptr address) {
  CUresult result = emu_leave();
  if (result || (result = emu_capture_unsafe()))
    return result;
  pthread_mutex_lock(&lock);
  opened **link = &openings;
  while (*link && (*link)->address != address)
    link = &(*link)->next;
  opened *found = *link;
  if (!found) {
    result = emu_fail(CUDA_ERROR_INVALID_VALUE, WHAT ": no opened handle has the address 0x%llx",
                      (unsigned long long)address);
  } else if (--found->count == 0) {
    *link = found->next;
    emu_mapping_end(address, EMU_MAPPING_IPC);
    close(found->fd);
    free(found);
    atomic_fetch_sub(&emu.live, 1);
  }
  pthread_mutex_unlock(&lock);
  return result ? result : emu_lost();
}
