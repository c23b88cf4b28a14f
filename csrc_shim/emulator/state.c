/* The state of the emulated devices: current contexts, error texts, and the checks at the start of each driver call. */
#include "emulator/state.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/thread_memory.h"

emu_state emu;

static _Thread_local emu_device *current;

/* ---- errors ---- */

enum { ERROR_BYTES = 384 };
static _Thread_local char *last_error; /* NULL before the thread's first error */

CUresult emu_fail(CUresult code, const char *format, ...) {
  static ocp_thread_memory texts = {.release = free};
  if (!last_error && !(last_error = ocp_thread_memory_make(&texts, ERROR_BYTES)))
    return code; /* out of memory */
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(last_error, ERROR_BYTES, format, arguments);
  va_end(arguments);
  return code;
}

const char *emu_last_error(void) { return last_error ? last_error : ""; }

CUresult emu_enter(emu_device **device) {
  if (last_error)
    last_error[0] = 0;
  if (atomic_load_explicit(&emu.forked, memory_order_relaxed))
    return emu_fail(CUDA_ERROR_NOT_INITIALIZED, "the emulated device cannot be used in a forked child process");
  if (!atomic_load_explicit(&emu.started, memory_order_acquire))
    return CUDA_ERROR_NOT_INITIALIZED;
  emu_device *context = current;
  if (!context)
    return CUDA_ERROR_INVALID_CONTEXT;
  *device = context;
  return emu_error_of(context);
}

CUresult emu_leave(void) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  return result == CUDA_ERROR_NOT_INITIALIZED || result == CUDA_ERROR_INVALID_CONTEXT ? result : CUDA_SUCCESS;
}

CUresult emu_lost(void) { return emu_error_of(current); }

CUresult emu_error_of(const emu_device *device) {
  const CUresult error = atomic_load_explicit(&device->error, memory_order_acquire);
  return error && device->lost_text[0] ? emu_fail(error, "%s", device->lost_text) : error;
}

void emu_lose_device(emu_device *device, CUresult code, const char *format, ...) {
  if (atomic_load(&device->error))
    return;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(device->lost_text, sizeof device->lost_text, format, arguments);
  va_end(arguments);
  atomic_store(&device->error, code);
}

void emu_recover(emu_device *device) {
  atomic_store(&device->error, CUDA_SUCCESS);
  device->lost_text[0] = 0;
}

uint32_t emu_semaphore_seconds(void) { return emu.config.semaphore_seconds ? emu.config.semaphore_seconds : 60; }

/* ---- contexts ---- */

CUresult emu_ctx_set_current(CUcontext context) {
  current = context;
  return CUDA_SUCCESS;
}

CUresult emu_ctx_get_current(CUcontext *context) {
  if (!context)
    return CUDA_ERROR_INVALID_VALUE;
  *context = current;
  return CUDA_SUCCESS;
}
