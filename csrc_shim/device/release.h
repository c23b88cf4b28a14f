/* Handles failures of driver calls that release something (memory, streams, events, graphs, modules). The caller goes
 * on after such a failure, so it is logged instead of returned. */
#ifndef OCP_DEVICE_RELEASE_H
#define OCP_DEVICE_RELEASE_H

#include "device/device.h"

typedef enum ocp_freed {
  OCP_FREED,       /* the memory is free, or the context is gone with everything in it */
  OCP_FREE_LATER,  /* the call is impossible now, for example during a stream capture: the memory is still allocated,
                      and can be freed later */
  OCP_FREE_UNKNOWN /* the call failed: the memory may still be allocated. The driver may also have freed it and have
                      given it to another owner, so it must neither be reused nor be freed again. */
} ocp_freed;

/* Returns the state of memory after a driver call to free it returned `result`. Logs a failure after which the state is
 * unknown, once for each driver call; `call`: its name. */
ocp_freed ocp_device_freed(ocp_device *device, CUresult result, const char *call);
/* Logs the failure of a call that releases something, such as an event, once for each name. Logs nothing for a lost
 * device, whose resources are gone. For calls that free memory, use ocp_device_freed, which calls this function. */
void ocp_device_released(ocp_device *device, CUresult result, const char *call);

#endif
