/* Events of the emulated driver (cuEventCreate, cuEventRecord, ...). */
#include "emulator/calls/event.h"

#include <stdlib.h>
#include <time.h>

#include "emulator/clock.h"
#include "emulator/external/ipc_event.h"
#include "emulator/mempool.h"
#include "emulator/record.h"
#include "emulator/state.h"
#include "emulator/work/capture.h"
#include "emulator/work/queue.h"
#include "emulator/work/stream_list.h"

CUresult emu_event_create(CUevent *event, unsigned flags) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (result)
    return result;
  if (!event || flags > 7 || (flags & CU_EVENT_INTERPROCESS && !(flags & CU_EVENT_DISABLE_TIMING)))
    return CUDA_ERROR_INVALID_VALUE;
  CUevent made = calloc(1, sizeof *made);
  if (!made)
    return CUDA_ERROR_OUT_OF_MEMORY;
  made->flags = flags;
  if (flags & CU_EVENT_INTERPROCESS && (result = emu_ipc_event_make(&made->ipc))) {
    free(made);
    return result;
  }
  atomic_fetch_add(&emu.live, 1);
  *event = made;
  return CUDA_SUCCESS;
}

static void replace_record(CUevent event, emu_record *record) {
  emu_record_release(event->record);
  event->record = record;
  emu_capture_forget(event);
}

CUresult emu_event_destroy(CUevent event) {
  CUresult result = emu_leave();
  if (result)
    return result;
  if (!event)
    return CUDA_ERROR_INVALID_HANDLE;
  pthread_mutex_lock(&emu_order);
  replace_record(event, NULL);
  pthread_mutex_unlock(&emu_order);
  result = emu_ipc_event_destroy(event->ipc);
  free(event);
  atomic_fetch_sub(&emu.live, 1);
  return result ? result : emu_lost();
}

CUresult emu_event_record(CUevent event, CUstream stream) {
  CUresult result = emu_enter_stream(&stream);
  if (result)
    return result;
  if (!event)
    return CUDA_ERROR_INVALID_HANDLE;
  if (event->ipc)
    return emu_ipc_event_record(event->ipc, stream);
  emu_record *record = emu_record_make();
  if (!record)
    return CUDA_ERROR_OUT_OF_MEMORY;
  pthread_mutex_lock(&stream->lock);
  pthread_mutex_lock(&emu_order);
  if (emu_is_capturing(stream, &result)) {
    replace_record(event, NULL);
    result = emu_capture_record(stream, event);
  } else if (!result) {
    record->clock = emu_clock_snapshot(stream);
    replace_record(event, emu_record_share(record));
    if (emu.config.adversarial || emu_queue_blocks(stream))
      result = emu_queue_record(stream, record);
    else
      emu_record_finish(record);
  }
  pthread_mutex_unlock(&emu_order);
  pthread_mutex_unlock(&stream->lock);
  emu_record_release(record);
  return result;
}

CUresult emu_stream_wait_event(CUstream stream, CUevent event, unsigned flags) {
  CUresult result = emu_enter_stream(&stream);
  if (result)
    return result;
  if (!event || flags > 1)
    return event ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
  if (event->ipc)
    return emu_ipc_event_wait(event->ipc, stream);
  pthread_mutex_lock(&stream->lock);
  pthread_mutex_lock(&emu_order);
  if (!emu_capture_wait(stream, event, &result) && event->record) {
    emu_clock_join(stream, event->record->clock);
    if (!emu_record_is_done(event->record))
      result = emu_queue_wait(stream, event->record);
  }
  pthread_mutex_unlock(&emu_order);
  pthread_mutex_unlock(&stream->lock);
  return result;
}

/* Makes the checks at the start of a call that waits for or queries an event; *device: the current device. */
static CUresult enter_with(CUevent event, emu_device **device) {
  const CUresult result = emu_enter(device);
  if (result)
    return result;
  return event ? emu_capture_event(event) : CUDA_ERROR_INVALID_HANDLE;
}

CUresult emu_event_synchronize(CUevent event) {
  emu_device *device;
  CUresult result = enter_with(event, &device);
  if (result)
    return result;
  if (event->ipc)
    return emu_ipc_event_synchronize(event->ipc, device);
  pthread_mutex_lock(&emu_order);
  emu_record *record = emu_record_share(event->record);
  while (!emu_record_is_done(record) && (emu_queue_run() || emu_queue_await())) {
  }
  if (record)
    emu_clock_host_waits(record->clock);
  emu_record_release(record);
  pthread_mutex_unlock(&emu_order);
  emu_mempools_synchronized(device);
  return emu_error_of(device);
}

static bool is_done(const struct CUevent_st *event) {
  return event->ipc ? emu_ipc_event_is_done(event->ipc) : emu_record_is_done(event->record);
}

CUresult emu_event_query(CUevent event) {
  emu_device *device;
  CUresult result = enter_with(event, &device);
  if (result)
    return result;
  pthread_mutex_lock(&emu_order);
  if (!is_done(event) && emu_random(2)) /* polling makes deferred work run, at random */
    emu_queue_run();
  result = is_done(event) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
  if (!result && event->record)
    emu_clock_host_waits(event->record->clock);
  pthread_mutex_unlock(&emu_order);
  return result ? result : emu_error_of(device);
}

CUresult emu_event_elapsed_time(float *milliseconds, CUevent start, CUevent end) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (result)
    return result;
  if (!milliseconds)
    return CUDA_ERROR_INVALID_VALUE;
  if (!start || !end || (start->flags | end->flags) & CU_EVENT_DISABLE_TIMING)
    return CUDA_ERROR_INVALID_HANDLE;
  pthread_mutex_lock(&emu_order);
  if (!start->record || !end->record)
    result = CUDA_ERROR_INVALID_HANDLE;
  else if (!emu_record_is_done(start->record) || !emu_record_is_done(end->record))
    result = CUDA_ERROR_NOT_READY;
  else
    *milliseconds = (float)(end->record->time - start->record->time);
  pthread_mutex_unlock(&emu_order);
  return result;
}
