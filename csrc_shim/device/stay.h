/* A scope in which a device's context is current on the calling thread. The application may use CUDA as well, so the
 * end of the scope restores the context that was current before, on every return path. */
#ifndef OCP_DEVICE_STAY_H
#define OCP_DEVICE_STAY_H

#include "driver/driver.h"

typedef struct ocp_stay {
  bool entered;
  const ocp_driver *driver; /* NULL: the context was current before, and stays current */
  CUcontext before;
} ocp_stay;

#endif
