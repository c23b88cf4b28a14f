/* A CUDA or emulated device: its primary context, which threads make current for a scope (stay.h), and whether a sticky
 * error has made the device unusable ("lost"). */
#ifndef OCP_DEVICE_DEVICE_H
#define OCP_DEVICE_DEVICE_H

#include <stdatomic.h>

#include "base/error.h"
#include "device/stay.h"
#include "driver/driver.h"

enum { OCP_MAX_DEVICES = 64 }; /* maximum number of CUDA devices, and of emulated devices */
/* Fails with ORT_INVALID_ARGUMENT unless the ordinal is one of 0 to OCP_MAX_DEVICES - 1. */
int ocp_device_check_ordinal(int ordinal, ocp_error *error);

/* A device of the process. The first ocp_device_open (open/devices.h) makes it; it lives as long as the process. */
typedef struct ocp_device {
  const ocp_driver *driver;
  CUcontext context;
  CUdevice device;
  int ordinal;
  bool emulated;
  int cc_major, cc_minor;
  size_t total_bytes;
  atomic_int lost;       /* the sticky CUDA error that made the device unusable; 0: usable. Set once. */
  struct ocp_pool *pool; /* pool.h: the arenas, and the progress of the streams */
} ocp_device;

/* Fails when the device is lost, and in a forked child. */
int ocp_device_check(const ocp_device *device, ocp_error *error);
/* Declares a stay that ends with its scope: OCP_STAY stay = ocp_device_enter(device, error); */
#define OCP_STAY __attribute__((cleanup(ocp_device_leave))) ocp_stay
/* Checks the device as ocp_device_check does, and makes its context current on the calling thread until the stay ends.
 * Meanwhile the thread's capture mode is THREAD_LOCAL or more relaxed: stream captures of other threads, such as those
 * of torch.cuda.graph, neither forbid a call nor are invalidated by it, but a capture of the thread itself still
 * forbids calls that may synchronize. A stay inside another stay on the same device costs one cuCtxGetCurrent. If the
 * stay's `entered` is false, `error` says why. */
ocp_stay ocp_device_enter(ocp_device *device, ocp_error *error);
/* Enters a device to release a resource. Unlike ocp_device_enter, also enters a lost device, and lets a thread that
 * captures a stream call the driver (capture mode RELAXED): nothing uses the resource any more, so the release cannot
 * disturb the capture. Does not enter in a forked child, which must not use the device. */
ocp_stay ocp_device_enter_to_release(const ocp_device *device);
void ocp_device_leave(ocp_stay *stay);
/* Sets whether the application captures the Run that the calling thread executes. If so, the thread's stays use the
 * capture mode RELAXED, so that the Run can allocate memory although the application's capture may forbid it. This is
 * safe because the memory lives as long as the session. */
void ocp_device_in_foreign_capture(bool is_captured);
/* Calls ocp_fail_cuda, and marks the device lost when the error is sticky. */
int ocp_device_fail(ocp_device *device, CUresult result, const char *what, ocp_error *error) __attribute__((cold));

#endif
