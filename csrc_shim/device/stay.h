/* A scope in which a device's context is current on the calling thread, and in which no capture of another thread
 * forbids a driver call. The application may use CUDA as well, so the end of the scope restores the context and the
 * capture mode that the thread had before, on every return path. */
#ifndef OCP_DEVICE_STAY_H
#define OCP_DEVICE_STAY_H

#include "driver/driver.h"

/* A thread's capture mode (CU_STREAM_CAPTURE_MODE_...), which each of the two drivers (CUDA, emulated) keeps
 * separately. */
typedef struct ocp_capture_mode {
  const ocp_driver *driver;
  int mode;
} ocp_capture_mode;

typedef struct ocp_stay {
  bool entered;
  const ocp_driver *driver; /* NULL: the context was current before, and stays current */
  CUcontext before;
  ocp_capture_mode mode_before; /* driver NULL: the mode was relaxed enough, and stays as it is */
  ocp_capture_mode outer;       /* the mode that the enclosing stays have set */
} ocp_stay;

#endif
