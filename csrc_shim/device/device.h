/* A CUDA or emulated device: its primary context, entered by threads, and whether a sticky error has made it unusable.
 */
#ifndef OCP_DEVICE_DEVICE_H
#define OCP_DEVICE_DEVICE_H

#include <stdatomic.h>

#include "base/error.h"
#include "device/stay.h"
#include "driver/driver.h"

enum { OCP_MAX_DEVICES = 64 }; /* maximum number of CUDA devices, and of emulated devices */
/* Fails with ORT_INVALID_ARGUMENT unless the ordinal is one of 0 to OCP_MAX_DEVICES - 1. */
int ocp_device_check_ordinal(int ordinal, ocp_error *error);

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
  struct ocp_pool *pool; /* pool.h: the arenas, and the progress of the streams */
} ocp_device;

/* Fails when the device is lost, and in a forked child. */
int ocp_device_check(const ocp_device *device, ocp_error *error);
/* Declares a stay that ends with its scope: OCP_STAY stay = ocp_device_enter(device, error); */
#define OCP_STAY __attribute__((cleanup(ocp_device_leave))) ocp_stay
/* Checks the device as ocp_device_check does, and makes its context current on the calling thread until the stay ends.
 * Until then captures of other threads, such as those of torch.cuda.graph, forbid the thread no call, and its calls do
 * not invalidate these captures; a capture of the thread itself still forbids calls that may synchronise. A stay inside
 * another stay on the same device costs one cuCtxGetCurrent. If `entered` is false, `error` says why. */
ocp_stay ocp_device_enter(ocp_device *device, ocp_error *error);
/* Enters a device to release something, even if the device is lost, or if the thread itself captures: what is released
 * is in no use, whenever the application drops it. Does not enter in a forked child, which must not touch anything of
 * the device. */
ocp_stay ocp_device_enter_to_release(const ocp_device *device);
void ocp_device_leave(ocp_stay *stay);
/* Says whether the application captures the Run that the calling thread executes. While it does, stays of the thread
 * lift the ban of the application's capture, which may be in any mode: what the Run allocates lives as long as the
 * session. */
void ocp_device_in_foreign_capture(bool is_captured);
/* Calls ocp_fail_cuda, and marks the device lost when the error is sticky. */
int ocp_device_fail(ocp_device *device, CUresult result, const char *what, ocp_error *error);

#endif
