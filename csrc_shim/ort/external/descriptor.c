#include "ort/external/descriptor.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <unistd.h>

enum { OLDEST_VERSION = 24 }; /* API version that added the interop API */

int ocp_duplicate_descriptor(const void *native_handle, const char *what, int *fd, ocp_error *error) {
  const intptr_t number = (intptr_t)native_handle;
  if (!native_handle)
    return ocp_fail(error, ORT_INVALID_ARGUMENT,
                    "%s: native_handle is not set, expected a file descriptor. (Descriptor 0 cannot be imported; "
                    "duplicate it)",
                    what);
  if (number < 0 || number > INT_MAX)
    return ocp_fail(error, ORT_INVALID_ARGUMENT, "%s: native_handle is %p, expected a file descriptor", what,
                    native_handle);
  *fd = fcntl((int)number, F_DUPFD_CLOEXEC, 0);
  if (*fd >= 0)
    return ORT_OK;
  return ocp_fail(error, errno == EBADF ? ORT_INVALID_ARGUMENT : ORT_FAIL,
                  "%s: file descriptor %d cannot be duplicated: %s", what, (int)number, strerror(errno));
}

void ocp_close_descriptor(const void *native_handle) { close((int)(intptr_t)native_handle); }

int ocp_check_descriptor_version(uint32_t version, const char *what, ocp_error *error) {
  if (version >= OLDEST_VERSION)
    return ORT_OK;
  return ocp_fail(error, ORT_INVALID_ARGUMENT, "%s: version is %u, expected ORT_API_VERSION, %d or newer", what,
                  version, OLDEST_VERSION);
}
