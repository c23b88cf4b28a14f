#include "device/memory/preserve.h"

#include <stdlib.h>

#include "base/counters.h"
#include "device/memory/memory.h"
#include "device/order.h"
#include "device/run_memory.h"
#include "driver/driver.h"

static _Thread_local ocp_preserved *current; /* the recording of the calling thread's Run */

void ocp_preserve_begin(ocp_preserved *preserved, ocp_device *device) {
  preserved->device = device;
  current = preserved;
}

void ocp_preserve_forget(void) { current = NULL; }

bool ocp_preserve_is_wanted(const ocp_device *device) { return current && current->device == device; }

static bool overlaps(const ocp_touched *touched, uint64_t start, uint64_t end) {
  return touched->start < end && start < touched->end;
}

static int note(uint64_t start, uint64_t end, bool written, ocp_error *error) {
  ocp_touched *touched = malloc(sizeof *touched);
  if (!touched)
    return ocp_fail_memory(error);
  *touched = (ocp_touched){.next = current->touched, .start = start, .end = end, .written = written};
  current->touched = touched;
  return ORT_OK;
}

int ocp_preserve_reads(uint64_t address, uint64_t bytes, ocp_error *error) {
  const uint64_t end = address + bytes;
  if (bytes == 0)
    return ORT_OK;
  for (const ocp_touched *touched = current->touched; touched; touched = touched->next)
    if (touched->written ? overlaps(touched, address, end) : touched->start == address && touched->end == end)
      return ORT_OK;
  return note(address, end, /*written=*/false, error);
}

static int save(ocp_touched *touched, ocp_stream *stream, ocp_error *error) {
  ocp_device *device = current->device;
  const uint64_t bytes = touched->end - touched->start;
  /* Keeps the copy out of the Run's recorded allocations (run_memory.h), which belong to the graph later: the captured
   * repetition of the Run makes no copies. */
  ocp_run_memory *watched = ocp_run_memory_pause();
  const int code = ocp_device_alloc(device, bytes, stream, &touched->copy, error);
  ocp_run_memory_resume(watched);
  if (code != ORT_OK) {
    const ocp_error cause = *error;
    return ocp_fail(error, cause.code,
                    "ONNX Runtime repeats this Run until the Run is captured, so an input that shares memory with an "
                    "output must be copied, and the allocation for the copy failed: %.600s",
                    cause.text);
  }
  const CUresult result = device->driver->MemcpyDtoDAsync(touched->copy, touched->start, bytes, stream->handle);
  if (result != CUDA_SUCCESS)
    return ocp_device_fail(device, result, "saving an input that a repeated Run overwrites: cuMemcpyDtoDAsync", error);
  ocp_count(OCP_COPIES_D2D, 1);
  return ORT_OK;
}

int ocp_preserve_writes(uint64_t address, uint64_t bytes, bool kept, ocp_stream *stream, ocp_error *error) {
  const uint64_t end = address + bytes;
  if (bytes == 0)
    return ORT_OK;
  for (ocp_touched *touched = current->touched; touched; touched = touched->next) {
    const bool stays = kept && touched->start == address && touched->end == end;
    if (!touched->written && !touched->copy && !stays && overlaps(touched, address, end) &&
        save(touched, stream, error) != ORT_OK)
      return error->code;
  }
  return note(address, end, /*written=*/true, error);
}

static void release(ocp_preserved *preserved, ocp_stream *stream) {
  for (ocp_touched *touched = preserved->touched, *next; touched; touched = next) {
    next = touched->next;
    if (touched->copy)
      ocp_device_free(preserved->device, touched->copy, stream);
    free(touched);
  }
  preserved->touched = NULL;
}

int ocp_preserve_end(ocp_preserved *preserved, ocp_stream *stream, ocp_error *error) {
  ocp_device *device = preserved->device;
  int code = ORT_OK;
  ocp_preserve_forget();
  if (!preserved->touched)
    return ORT_OK;
  for (const ocp_touched *touched = preserved->touched; touched && code == ORT_OK; touched = touched->next) {
    if (!touched->copy)
      continue;
    const CUresult result =
        device->driver->MemcpyDtoDAsync(touched->start, touched->copy, touched->end - touched->start, stream->handle);
    if (result != CUDA_SUCCESS)
      code =
          ocp_device_fail(device, result, "restoring an input that a repeated Run overwrote: cuMemcpyDtoDAsync", error);
    ocp_count(OCP_COPIES_D2D, 1);
  }
  release(preserved, stream);
  ocp_stream_enqueued(stream);
  return code;
}

void ocp_preserve_drop(ocp_preserved *preserved) {
  if (current == preserved)
    ocp_preserve_forget();
  release(preserved, NULL);
}
