#define _GNU_SOURCE /* memfd_create, F_ADD_SEALS, F_OFD_SETLK */
#include "emulator/external/ipc_handle.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include "emulator/state.h"
#include "emulator/work/timeline.h"

#define FILE_NAME "ocp-ipc"

typedef struct handle_fields {
  char magic[8];
  uint64_t secret;
  int32_t process, fd;
} handle_fields;
_Static_assert(sizeof(handle_fields) <= CU_IPC_HANDLE_SIZE, "CUDA's handles have 64 bytes");

static handle_fields fields_of(const char handle[CU_IPC_HANDLE_SIZE]) {
  handle_fields fields;
  memcpy(&fields, handle, sizeof fields);
  return fields;
}

uint64_t emu_ipc_secret(const char handle[CU_IPC_HANDLE_SIZE]) { return fields_of(handle).secret; }

CUresult emu_ipc_make_file(int *fd) {
  *fd = memfd_create(FILE_NAME, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (*fd >= 0)
    return CUDA_SUCCESS;
  return emu_fail(CUDA_ERROR_OUT_OF_MEMORY, "the system gives no file in memory for CUDA IPC: %s", strerror(errno));
}

CUresult emu_ipc_export(const emu_ipc_kind *kind, emu_ipc_header *record, int *fd, char handle[CU_IPC_HANDLE_SIZE]) {
  CUresult result = emu_ipc_make_file(fd);
  if (result)
    return result;
  memcpy(record->magic, kind->magic, sizeof record->magic);
  const int seals = F_SEAL_SHRINK | F_SEAL_GROW | (kind->access == O_RDONLY ? F_SEAL_WRITE : 0);
  if (getrandom(&record->secret, sizeof record->secret, 0) != (ssize_t)sizeof record->secret ||
      pwrite(*fd, record, kind->bytes, 0) != (ssize_t)kind->bytes || fcntl(*fd, F_ADD_SEALS, seals)) {
    result = emu_fail(CUDA_ERROR_OUT_OF_MEMORY, "%s: the record of a handle cannot be written: %s", kind->what,
                      strerror(errno));
    close(*fd);
    return result;
  }
  handle_fields fields = {.secret = record->secret, .process = (int32_t)getpid(), .fd = *fd};
  memcpy(fields.magic, kind->magic, sizeof fields.magic);
  memset(handle, 0, CU_IPC_HANDLE_SIZE);
  memcpy(handle, &fields, sizeof fields);
  return CUDA_SUCCESS;
}

CUresult emu_ipc_open(int process, int fd, int access, const char *what, int *out) {
  char path[64], target[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", process, fd);
  const ssize_t length = readlink(path, target, sizeof target - 1);
  static const char name[] = "/memfd:" FILE_NAME;
  /* Looks before it opens: to open a pipe or a terminal has effects. */
  const bool is_ours = length >= (ssize_t)strlen(name) && memcmp(target, name, strlen(name)) == 0;
  *out = is_ours ? open(path, access | O_CLOEXEC | O_NONBLOCK | O_NOCTTY) : -1;
  if (*out >= 0)
    return CUDA_SUCCESS;
  return emu_fail(
      CUDA_ERROR_INVALID_HANDLE,
      "%s: process %d does not have the exported object%s%s. The exporter must live, have the same user and "
      "PID namespace, and must not have freed the object",
      what, process, length < 0 || is_ours ? ": " : "", length < 0 || is_ours ? strerror(errno) : "");
}

CUresult emu_ipc_import(const emu_ipc_kind *kind, const char handle[CU_IPC_HANDLE_SIZE], emu_ipc_header *record,
                        int *fd, int *process) {
  const handle_fields fields = fields_of(handle);
  if (memcmp(fields.magic, kind->magic, sizeof fields.magic) != 0 || fields.process <= 0 || fields.fd < 0)
    return emu_fail(CUDA_ERROR_INVALID_HANDLE, "%s: these 64 bytes are not a handle of the emulated device",
                    kind->what);
  if (fields.process == (int32_t)getpid())
    return emu_fail(CUDA_ERROR_INVALID_CONTEXT, "%s: this process exported the handle. Use the exported object itself",
                    kind->what);
  CUresult result = emu_ipc_open(fields.process, fields.fd, kind->access, kind->what, fd);
  if (result)
    return result;
  const struct flock importer = {.l_type = F_RDLCK, .l_whence = SEEK_SET};
  if ((result = emu_check_shared_file(*fd, kind->bytes, kind->what)) == CUDA_SUCCESS &&
      (pread(*fd, record, kind->bytes, 0) != (ssize_t)kind->bytes || record->secret != fields.secret ||
       fcntl(*fd, F_OFD_SETLK, &importer)))
    result =
        emu_fail(CUDA_ERROR_INVALID_HANDLE, "%s: process %d has freed the exported object", kind->what, fields.process);
  *process = fields.process;
  if (result)
    close(*fd);
  return result;
}

bool emu_ipc_is_open(int fd) {
  struct flock importer = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
  return fcntl(fd, F_OFD_GETLK, &importer) == 0 && importer.l_type != F_UNLCK;
}
