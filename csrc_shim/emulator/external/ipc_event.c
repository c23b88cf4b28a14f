#include "emulator/external/ipc_event.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "emulator/external/ipc_handle.h"
#include "emulator/record.h"
#include "emulator/work/capture.h"
#include "emulator/work/progress.h"
#include "emulator/work/queue.h"

#define WHAT "CUDA IPC event"

enum { POLL_NANOSECONDS = 200000 };

typedef struct record {
  emu_ipc_header header; /* magic and counter are those of a timeline */
  _Atomic uint64_t recorded;
} record;

static const emu_ipc_kind kind = {.what = WHAT, .magic = EMU_TIMELINE_MAGIC, .bytes = sizeof(record), .access = O_RDWR};

struct emu_ipc_event {
  int fd; /* of the record; owned */
  bool is_imported;
  record *shared;
  emu_timeline *done; /* the newest recording that its stream has reached */
  CUipcEventHandle handle;
};

/* Maps the counters of the event, whose descriptor is set. */
static CUresult map(emu_ipc_event *event) {
  void *mapped = mmap(NULL, sizeof(record), PROT_READ | PROT_WRITE, MAP_SHARED, event->fd, 0);
  if (mapped == MAP_FAILED)
    return CUDA_ERROR_OUT_OF_MEMORY;
  const CUresult result = emu_timeline_map(event->fd, WHAT, &event->done);
  if (result)
    munmap(mapped, sizeof(record));
  else
    event->shared = mapped;
  return result;
}

CUresult emu_ipc_event_make(emu_ipc_event **out) {
  record initial = {.header = {.counter = 0}};
  emu_ipc_event *made = calloc(1, sizeof *made);
  if (!made)
    return CUDA_ERROR_OUT_OF_MEMORY;
  CUresult result = emu_ipc_export(&kind, &initial.header, &made->fd, made->handle.reserved);
  if (!result && (result = map(made)))
    close(made->fd);
  if (result)
    free(made);
  else
    *out = made;
  return result;
}

CUresult emu_ipc_event_destroy(emu_ipc_event *event) {
  CUresult result = CUDA_SUCCESS;
  if (!event)
    return result;
  if (!event->is_imported && emu_ipc_is_open(event->fd))
    result = emu_fail(EMU_ERROR_ILLEGAL_STATE, WHAT ": the event is destroyed although another process still has it "
                                                    "open. Destroy it there first");
  emu_timeline_release(event->done); /* enqueued work has references of its own */
  munmap(event->shared, sizeof *event->shared);
  close(event->fd);
  free(event);
  return result;
}

typedef CUresult queue_fn(CUstream stream, emu_timeline *timeline, uint64_t value);

/* Queues a signal or a wait, as for external semaphores: in both modes of the streams. */
static CUresult enqueue(queue_fn *queue, emu_timeline *timeline, uint64_t value, CUstream stream) {
  CUresult result;
  pthread_mutex_lock(&stream->lock);
  pthread_mutex_lock(&emu_order);
  if (!emu_progress())
    result = emu_fail(CUDA_ERROR_OUT_OF_MEMORY, "the system gives no thread that runs work with events of CUDA IPC");
  else
    result = queue(stream, timeline, value);
  pthread_mutex_unlock(&emu_order);
  pthread_mutex_unlock(&stream->lock);
  return result;
}

CUresult emu_ipc_event_record(emu_ipc_event *event, CUstream stream) {
  CUresult result = emu_capture_forbids(stream);
  if (result)
    return result;
  const uint64_t value = atomic_fetch_add(&event->shared->recorded, 1) + 1;
  result = enqueue(emu_queue_external_signal, event->done, value, stream);
  if (result) /* no stream will reach this recording, so no wait may depend on it */
    emu_timeline_signal(event->done, value);
  return result;
}

CUresult emu_ipc_event_wait(const emu_ipc_event *event, CUstream stream) {
  const CUresult result = emu_capture_forbids(stream);
  const uint64_t value = atomic_load(&event->shared->recorded);
  if (result || value == 0)
    return result;
  return enqueue(emu_queue_external_wait, event->done, value, stream);
}

bool emu_ipc_event_is_done(const emu_ipc_event *event) {
  return emu_timeline_value(event->done) >= atomic_load(&event->shared->recorded);
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

CUresult emu_ipc_event_synchronize(const emu_ipc_event *event, emu_device *device) {
  const uint64_t value = atomic_load(&event->shared->recorded);
  const double end = now() + emu_semaphore_seconds();
  pthread_mutex_lock(&emu_order);
  while (emu_timeline_value(event->done) < value && !atomic_load(&device->error)) {
    if (emu_queue_run() || emu_queue_await())
      continue;
    if (now() > end)
      emu_lose_device(device, CUDA_ERROR_LAUNCH_TIMEOUT,
                      "the program waits for a " WHAT ", which another process has recorded but not reached after %u "
                      "seconds. Set " EMU_SEMAPHORE_VARIABLE " to more seconds",
                      emu_semaphore_seconds());
    pthread_mutex_unlock(&emu_order);
    nanosleep(&(struct timespec){.tv_nsec = POLL_NANOSECONDS}, NULL);
    pthread_mutex_lock(&emu_order);
  }
  pthread_mutex_unlock(&emu_order);
  return emu_error_of(device);
}

CUresult emu_ipc_get_event_handle(CUipcEventHandle *handle, CUevent event) {
  emu_device *device;
  const CUresult result = emu_enter(&device);
  if (result)
    return result;
  if (!handle)
    return CUDA_ERROR_INVALID_VALUE;
  if (!event || !event->ipc || event->ipc->is_imported)
    return emu_fail(CUDA_ERROR_INVALID_HANDLE,
                    WHAT ": expected an event that this process has created with CU_EVENT_INTERPROCESS");
  *handle = event->ipc->handle;
  return CUDA_SUCCESS;
}

CUresult emu_ipc_open_event_handle(CUevent *event, CUipcEventHandle handle) {
  emu_device *device;
  record imported;
  int process;
  CUresult result = emu_enter(&device);
  if (result)
    return result;
  if (!event)
    return CUDA_ERROR_INVALID_VALUE;
  struct CUevent_st *made = calloc(1, sizeof *made);
  emu_ipc_event *shared = calloc(1, sizeof *shared);
  if (!made || !shared) {
    result = CUDA_ERROR_OUT_OF_MEMORY;
  } else {
    shared->is_imported = true;
    result = emu_ipc_import(&kind, handle.reserved, &imported.header, &shared->fd, &process);
    if (!result && (result = map(shared)))
      close(shared->fd);
  }
  if (result) {
    free(made);
    free(shared);
    return result;
  }
  made->flags = CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING;
  made->ipc = shared;
  atomic_fetch_add(&emu.live, 1);
  *event = made;
  return CUDA_SUCCESS;
}
