#include "base/error.h"

#include <stdarg.h>
#include <stdio.h>

int ocp_fail(ocp_error *error, int code, const char *format, ...) {
  error->code = code;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(error->text, sizeof error->text, format, arguments);
  va_end(arguments);
  return code;
}

int ocp_fail_memory(ocp_error *error) { return ocp_fail(error, ORT_FAIL, OCP_OUT_OF_HOST_MEMORY); }
