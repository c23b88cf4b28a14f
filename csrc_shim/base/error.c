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
