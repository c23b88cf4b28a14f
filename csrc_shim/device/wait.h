/* Waiting for the streams of a device, and finding out without waiting which have become idle. */
#ifndef OCP_DEVICE_WAIT_H
#define OCP_DEVICE_WAIT_H

#include "base/error.h"
#include "device/device.h"

/* Waits for all of the device's streams. */
int ocp_device_synchronize(ocp_device *device, ocp_error *error);
/* Waits for all work that the calling thread can have heard of, for a caller that does not know which streams used the
 * memory that it reads or writes. Does not wait for Runs that other threads are in: no other thread can have their
 * results before they end. */
int ocp_device_settle(ocp_device *device, ocp_error *error);
/* The same as ocp_device_synchronize, for a caller that has entered the device. */
int ocp_pool_synchronize(ocp_device *device, ocp_error *error);
/* Finds out without waiting which streams have become idle. */
void ocp_pool_poll(ocp_device *device);

#endif
