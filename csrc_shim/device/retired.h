/* Releases resources that enqueued work may still use, such as imported memory, once that work has finished. The
 * releasing thread does not wait, because the work itself may wait for a signal that the thread gives later. */
#ifndef OCP_DEVICE_RETIRED_H
#define OCP_DEVICE_RETIRED_H

#include "device/device.h"
#include "device/pool.h"

/* A resource to release: a member of the resource's own struct. */
struct ocp_retired {
  struct ocp_retired *next;
  uint64_t position; /* number of the newest work when the resource was retired */
  void (*release)(struct ocp_retired *self);
};

/* Calls `release` once the work that was enqueued by now has finished, or the device is lost: at once, or in a later
 * call of one of these two functions. */
void ocp_retire(ocp_device *device, ocp_retired *retired, void (*release)(ocp_retired *self));
/* Releases the retired resources whose work has finished. */
void ocp_release_retired(ocp_device *device);

#endif
