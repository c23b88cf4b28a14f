/* Waits and signals are items of the stream's queue (work/queue.h), in both modes of the streams: a wait never blocks
 * the thread that enqueues it. CUDA does not define two cases: a signal that does not increase the value, and the
 * destruction of a semaphore that enqueued work still uses. The emulated device reports both as errors; the call of
 * the second case destroys the semaphore all the same. CUDA can also capture waits and signals into graphs. No caller
 * needs that, so it is not emulated. */
#include "emulator/external/external_semaphore.h"

#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "emulator/state.h"
#include "emulator/work/capture.h"
#include "emulator/work/progress.h"
#include "emulator/work/queue.h"
#include "emulator/work/stream_list.h"
#include "emulator/work/timeline.h"

struct CUextSemaphore_st {
  struct CUextSemaphore_st *next;
  int fd; /* owned */
  emu_timeline *timeline;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards the list; taken before emu_order */
static struct CUextSemaphore_st *all;

CUresult emu_import_external_semaphore(CUexternalSemaphore *semaphore,
                                       const CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC *desc) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (result || (result = emu_capture_unsafe()))
    return result;
  if (!semaphore || !desc || desc->flags)
    return CUDA_ERROR_INVALID_VALUE;
  if (desc->type != CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_TIMELINE_SEMAPHORE_FD)
    return emu_fail(CUDA_ERROR_NOT_SUPPORTED, "handle type %d of external semaphores is not emulated", desc->type);
  struct CUextSemaphore_st *made = calloc(1, sizeof *made);
  if (!made)
    return CUDA_ERROR_OUT_OF_MEMORY;
  made->fd = desc->handle.fd;
  if ((result = emu_timeline_map(made->fd, "timeline semaphore", &made->timeline))) {
    free(made);
    return result;
  }
  pthread_mutex_lock(&lock);
  made->next = all;
  all = made;
  pthread_mutex_unlock(&lock);
  atomic_fetch_add(&emu.live, 1);
  *semaphore = made;
  return CUDA_SUCCESS;
}

static struct CUextSemaphore_st **link_of(CUexternalSemaphore semaphore) {
  struct CUextSemaphore_st **link = &all;
  while (*link && *link != semaphore)
    link = &(*link)->next;
  return link;
}

static CUresult fail_handle(CUexternalSemaphore semaphore) {
  return emu_fail(CUDA_ERROR_INVALID_HANDLE, "%p is not an external semaphore", (void *)semaphore);
}

typedef CUresult queue_fn(CUstream stream, emu_timeline *timeline, uint64_t value);

static CUresult enqueue(queue_fn *queue, CUexternalSemaphore semaphore, const ocp_external_params *params,
                        CUstream stream) {
  CUresult result;
  pthread_mutex_lock(&stream->lock);
  pthread_mutex_lock(&lock);
  pthread_mutex_lock(&emu_order);
  if (!*link_of(semaphore))
    result = fail_handle(semaphore);
  else if (queue == emu_queue_external_signal && emu_timeline_value(semaphore->timeline) >= params->fence)
    result = emu_fail(CUDA_ERROR_INVALID_VALUE,
                      "a signal sets the value %llu of a timeline semaphore whose value is %llu already. Signal a "
                      "larger value",
                      params->fence, (unsigned long long)emu_timeline_value(semaphore->timeline));
  else if (!emu_progress())
    result = emu_fail(CUDA_ERROR_OUT_OF_MEMORY, "the system gives no thread that runs work with external semaphores");
  else
    result = queue(stream, semaphore->timeline, params->fence);
  pthread_mutex_unlock(&emu_order);
  pthread_mutex_unlock(&lock);
  pthread_mutex_unlock(&stream->lock);
  return result;
}

/* Makes the checks at the start of a wait or a signal, and finds its stream. */
static CUresult enter(const void *semaphores, const void *params, unsigned count, CUstream *stream) {
  const CUresult result = emu_enter_stream(stream);
  if (result)
    return result;
  if (!semaphores || !params || count == 0)
    return CUDA_ERROR_INVALID_VALUE;
  return emu_capture_forbids(*stream);
}

CUresult emu_signal_external_semaphores(const CUexternalSemaphore *semaphores,
                                        const CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS *params, unsigned count,
                                        CUstream stream) {
  CUresult result = enter(semaphores, params, count, &stream);
  for (unsigned i = 0; i < count && !result; i++)
    result = params[i].flags ? CUDA_ERROR_INVALID_VALUE
                             : enqueue(emu_queue_external_signal, semaphores[i], &params[i].params, stream);
  return result;
}

CUresult emu_wait_external_semaphores(const CUexternalSemaphore *semaphores,
                                      const CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS *params, unsigned count,
                                      CUstream stream) {
  CUresult result = enter(semaphores, params, count, &stream);
  for (unsigned i = 0; i < count && !result; i++)
    result = params[i].flags ? CUDA_ERROR_INVALID_VALUE
                             : enqueue(emu_queue_external_wait, semaphores[i], &params[i].params, stream);
  return result;
}

CUresult emu_destroy_external_semaphore(CUexternalSemaphore semaphore) {
  CUresult result = emu_leave();
  if (result)
    return result;
  pthread_mutex_lock(&lock);
  struct CUextSemaphore_st **link = link_of(semaphore);
  const bool found = *link != NULL;
  if (found)
    *link = semaphore->next;
  pthread_mutex_unlock(&lock);
  if (!found)
    return fail_handle(semaphore);
  if (emu_timeline_is_used(semaphore->timeline) && !emu_lost()) /* a lost device runs none of that work */
    result =
        emu_fail(EMU_ERROR_ILLEGAL_STATE, "the semaphore is destroyed although enqueued work still waits for it or "
                                          "signals it. Wait for that work first");
  emu_timeline_release(semaphore->timeline); /* the work has references of its own */
  close(semaphore->fd);
  free(semaphore);
  atomic_fetch_sub(&emu.live, 1);
  return result ? result : emu_lost();
}
