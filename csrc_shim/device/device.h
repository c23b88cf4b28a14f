/* One CUDA or emulated device: made current per thread, marked lost by sticky errors. */
#ifndef OCP_DEVICE_DEVICE_H
#define OCP_DEVICE_DEVICE_H

#include <stdatomic.h>

#include "base/error.h"
#include "driver/driver.h"

enum { OCP_MAX_DEVICES = 64 }; /* of each kind */

/* Made on first use (devices.h), lives as long as the process. */
typedef struct ocp_device {
  const ocp_driver *driver;
  CUcontext context;
  CUdevice device;
  int ordinal;
  bool emulated;
  int cc_major, cc_minor;
  size_t total_bytes;
  atomic_int lost;       /* a sticky CUDA error, 0 while healthy; set once */
  struct ocp_pool *pool; /* pool.h: the arenas, and the order of the streams */
} ocp_device;

/* Fails when the device is lost, and in a forked child. */
int ocp_device_check(const ocp_device *device, ocp_error *error);
/* ocp_device_check, and makes the device's context current on the calling thread; cheap when it already is. */
int ocp_device_enter(ocp_device *device, ocp_error *error);
/* Makes the context current for calls that release something; a lost device accepts them as well. False in a forked
 * child, which must not touch anything of the device. */
bool ocp_device_enter_to_release(const ocp_device *device);
/* ocp_fail_cuda that also marks the device lost when the error is a sticky one. */
int ocp_device_fail(ocp_device *device, CUresult result, const char *what, ocp_error *error);

#endif
