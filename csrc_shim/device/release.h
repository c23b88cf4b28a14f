/* Results of driver calls after whose failure the caller goes on: calls that release something. */
#ifndef OCP_DEVICE_RELEASE_H
#define OCP_DEVICE_RELEASE_H

#include "device/device.h"

typedef enum ocp_freed {
  OCP_FREED,       /* freed, or the context is gone with everything in it */
  OCP_FREE_LATER,  /* a stream capture forbids the call now: the memory is as it was */
  OCP_FREE_UNKNOWN /* the call failed: the memory may still be allocated. The driver may also have freed it and have
                      given it to another owner, so it must neither be reused nor be freed again. */
} ocp_freed;

/* Returns what a call that frees memory has done. A failure that leaves it unknown is logged, once for each call. */
ocp_freed ocp_device_freed(ocp_device *device, CUresult result, const char *call);
/* Logs a failure of a call that releases something, such as an event: once for each call, and not for a lost device,
 * with which everything is released. */
void ocp_device_released(ocp_device *device, CUresult result, const char *call);

#endif
