/* Synchronizes the streams of a device, and queries which have become idle. */
#ifndef OCP_DEVICE_WAIT_H
#define OCP_DEVICE_WAIT_H

#include "base/error.h"
#include "device/device.h"

/* Waits for all of the device's streams, except for those that are being captured: they execute nothing. */
int ocp_device_synchronize(ocp_device *device, ocp_error *error);
/* Waits for all work whose results the calling thread may use (ocp_stream_is_known_to_be_busy). For callers that do not
 * know which streams used the memory that they access. Does not wait for unfinished Runs of other threads. */
int ocp_device_settle(ocp_device *device, ocp_error *error);
/* Like ocp_device_synchronize, for a caller that has entered the device. */
int ocp_pool_synchronize(ocp_device *device, ocp_error *error);
/* Queries which streams have become idle (cuStreamQuery), without waiting. Does nothing in a captured Run, because a
 * query would invalidate the capture. */
void ocp_pool_poll(ocp_device *device);

#endif
