#include "device/release.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "base/host.h"

/* MAX_REPORTED: maximum number of driver calls whose first failure is logged; the driver table has fewer calls that
 * release something. NAME_BYTES: buffer size of the name of a driver call. */
enum { MAX_REPORTED = 32, NAME_BYTES = 40 };

/* Whether this is the first failure in the process of the driver call with that name. */
static bool is_first(const char *call) {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  static char reported[MAX_REPORTED][NAME_BYTES];
  int i = 0;
  pthread_mutex_lock(&lock);
  while (i < MAX_REPORTED && *reported[i] && strcmp(reported[i], call) != 0)
    i++;
  const bool first = i < MAX_REPORTED && !*reported[i];
  if (first)
    snprintf(reported[i], NAME_BYTES, "%s", call);
  pthread_mutex_unlock(&lock);
  return first;
}

/* Whether the context no longer exists or is unusable, so that its allocations need not be freed. */
static bool is_gone(const ocp_device *device, CUresult result) {
  return atomic_load(&device->lost) || result == CUDA_ERROR_DEINITIALIZED ||
         result == 709; /* CUDA_ERROR_CONTEXT_IS_DESTROYED */
}

void ocp_device_released(ocp_device *device, CUresult result, const char *call) {
  ocp_error error;
  if (result == CUDA_SUCCESS)
    return;
  ocp_device_fail(device, result, call, &error); /* marks the device lost after a sticky error */
  if (is_gone(device, result) || !is_first(call))
    return;
  char text[1200];
  snprintf(text, sizeof text,
           "%s. What the call should have released counts as used until the process ends. Restart the process if the "
           "process runs out of memory; further failures of the call are not logged",
           error.text);
  ocp_log(ORT_LOGGING_LEVEL_WARNING, text, OCP_EP_NAME);
}

ocp_freed ocp_device_freed(ocp_device *device, CUresult result, const char *call) {
  if (result >= CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED && result <= CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
    return OCP_FREE_LATER;
  ocp_device_released(device, result, call);
  return result == CUDA_SUCCESS || is_gone(device, result) ? OCP_FREED : OCP_FREE_UNKNOWN;
}
