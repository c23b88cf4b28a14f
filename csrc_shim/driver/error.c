#include "driver/error.h"

int ocp_fail_cuda(ocp_error *error, const ocp_driver *driver, CUresult result, const char *what) {
  const char *name = NULL, *text = NULL;
  if (driver->GetErrorName(result, &name) != CUDA_SUCCESS || !name)
    name = "unknown error";
  if (driver->GetErrorString(result, &text) != CUDA_SUCCESS || !text)
    text = "no description";
  const char *detail = driver->LastErrorText ? driver->LastErrorText() : "";
  return ocp_fail(error, result == CUDA_ERROR_INVALID_VALUE ? ORT_INVALID_ARGUMENT : ORT_RUNTIME_EXCEPTION,
                  "%s failed: %s (%d: %s)%s%s", what, name, result, text, *detail ? ": " : "", detail);
}
