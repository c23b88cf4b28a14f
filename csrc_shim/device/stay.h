/* A stay in a device's context. The caller of the library may use CUDA as well: its current context is current again
 * when the stay ends, on every way out. */
#ifndef OCP_DEVICE_STAY_H
#define OCP_DEVICE_STAY_H

#include "driver/driver.h"

typedef struct ocp_stay {
  bool entered;
  const ocp_driver *driver; /* NULL: the context was current before, and stays so */
  CUcontext before;
} ocp_stay;

#endif
