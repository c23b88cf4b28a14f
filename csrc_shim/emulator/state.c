/* The state of the emulated devices: current contexts, error texts, and what each call of the driver checks first. */
#include "emulator/state.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

emu_state emu;

static _Thread_local emu_device *current;

/* ---- errors ---- */

enum { ERROR_BYTES = 384 };
static _Thread_local char *last_error; /* made at the thread's first error: the loader has little thread-local data */
static pthread_key_t error_key;        /* frees it with the thread */
static bool has_error_key;

static void make_error_key(void) { has_error_key = pthread_key_create(&error_key, free) == 0; }

/* The calling thread's message; NULL: out of memory. */
static char *error_text(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  if (last_error)
    return last_error;
  pthread_once(&once, make_error_key);
  char *made = has_error_key ? malloc(ERROR_BYTES) : NULL;
  if (made && pthread_setspecific(error_key, made)) {
    free(made);
    made = NULL;
  }
  return last_error = made;
}

CUresult emu_fail(CUresult code, const char *format, ...) {
  char *text = error_text();
  if (!text)
    return code;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, ERROR_BYTES, format, arguments);
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
  return atomic_load_explicit(&context->error, memory_order_relaxed);
}

CUresult emu_leave(void) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  return result == CUDA_ERROR_NOT_INITIALIZED || result == CUDA_ERROR_INVALID_CONTEXT ? result : CUDA_SUCCESS;
}

CUresult emu_lost(void) { return atomic_load(&current->error); }

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
