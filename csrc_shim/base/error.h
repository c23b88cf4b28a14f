/* Errors: a code and a message, which become an OrtStatus only at the boundary with ORT (host.h).
 *
 * A function that can fail takes an ocp_error. When it fails, it fills the error and returns the error's code; a
 * function that returns a pointer returns NULL instead. When it succeeds, it may leave the error as it was: a caller
 * that reads error->code afterwards clears it first. A caller adds context in front of the text and keeps the rest.
 * Functions that make an error are cold: compilers move the calls out of the code that a Run without errors executes.
 *
 * The plugin never chooses the code ORT_EP_FAIL: ORT's Python method InferenceSession.run would react by recreating the
 * session without the provider, and all later Runs would use the CPU. Errors of driver calls have the code
 * ORT_RUNTIME_EXCEPTION, or ORT_INVALID_ARGUMENT for CUDA_ERROR_INVALID_VALUE (driver/error.h). */
#ifndef OCP_BASE_ERROR_H
#define OCP_BASE_ERROR_H

#include "base/ort_abi.h" /* OrtErrorCode; generated from ort_cuda_plugin/abi by build_plugin.py */

typedef struct ocp_error {
  int code; /* OrtErrorCode; 0: no error */
  char text[1000];
} ocp_error;
/* Formats the message (truncating) and returns code. */
int ocp_fail(ocp_error *error, int code, const char *format, ...) __attribute__((format(printf, 3, 4), cold));

/* The message of every failed allocation of host memory, such as malloc. Device memory has messages of its own. */
#define OCP_OUT_OF_HOST_MEMORY                                                                                         \
  "out of host memory: an allocation in this process failed. End other processes, or raise the limit of this one's "   \
  "memory"
/* Fills the error for a failed allocation of host memory, and returns ORT_FAIL. */
int ocp_fail_memory(ocp_error *error) __attribute__((cold));

#endif
