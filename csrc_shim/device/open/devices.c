#include "device/open/devices.h"

#include <pthread.h>
#include <stdlib.h>

#include "base/process.h"
#include "device/memory/memory.h"
#include "device/open/arena_settings.h"
#include "device/pool.h"
#include "driver/cuda.h"
#include "driver/driver.h"
#include "driver/error.h"
#include "emulator/calls/table.h"

static pthread_mutex_t devices_lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic(ocp_device *) devices[2]
                                    [OCP_MAX_DEVICES]; /* [emulated][ordinal]; written under the lock, never cleared */

static uint32_t emulated_vendor_id;

static void choose_vendor_id(void) {
  const char *why = NULL;
  const ocp_driver *cuda = ocp_driver_cuda(&why);
  int gpus = 0;
  bool found = cuda && cuda->Init(0) == CUDA_SUCCESS && cuda->DeviceGetCount(&gpus) == CUDA_SUCCESS && gpus > 0;
  emulated_vendor_id = found ? OCP_VENDOR_EMULATED : OCP_VENDOR_NVIDIA;
}

uint32_t ocp_vendor_id(bool emulated) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, choose_vendor_id);
  return emulated ? emulated_vendor_id : OCP_VENDOR_NVIDIA;
}

static int open_failed(ocp_device *device, CUresult result, const char *what, ocp_error *error) {
  ocp_fail_cuda(error, device->driver, result, what);
  if (result == CUDA_ERROR_DEVICE_UNAVAILABLE) {
    const ocp_error driver = *error;
    ocp_fail(
        error, driver.code,
        "%.600s. The device refuses this process: its compute mode may be exclusive while another process uses the "
        "device, or prohibited. End the other process, or allow several with `nvidia-smi -c DEFAULT`",
        driver.text);
  }
  return error->code;
}

static int fill(ocp_device *device, bool emulated, int ordinal, ocp_error *error) {
  const char *why = NULL;
  const ocp_driver *driver = emulated ? ocp_driver_emulator() : ocp_driver_cuda(&why);
  if (!driver)
    return ocp_fail(error, ORT_RUNTIME_EXCEPTION, "no CUDA driver: %s", why);
  device->driver = driver;
  device->emulated = emulated;
  device->ordinal = ordinal;
  CUresult result = driver->Init(0);
  if (result != CUDA_SUCCESS)
    return open_failed(device, result, "cuInit", error);
  int count = 0;
  if ((result = driver->DeviceGetCount(&count)) != CUDA_SUCCESS)
    return open_failed(device, result, "cuDeviceGetCount", error);
  if (ordinal >= count)
    return ocp_fail(error, ORT_INVALID_ARGUMENT, "there is no %s %d: found %d devices, numbered from 0",
                    emulated ? "emulated CUDA device" : "CUDA device", ordinal, count);
  if ((result = driver->DeviceGet(&device->device, ordinal)) != CUDA_SUCCESS)
    return open_failed(device, result, "cuDeviceGet", error);
  if ((result = driver->DeviceGetAttribute(&device->cc_major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                                           device->device)) != CUDA_SUCCESS ||
      (result = driver->DeviceGetAttribute(&device->cc_minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                                           device->device)) != CUDA_SUCCESS)
    return open_failed(device, result, "cuDeviceGetAttribute", error);
  if ((result = driver->DeviceTotalMem(&device->total_bytes, device->device)) != CUDA_SUCCESS)
    return open_failed(device, result, "cuDeviceTotalMem", error);
  if ((result = driver->DevicePrimaryCtxRetain(&device->context, device->device)) != CUDA_SUCCESS)
    return open_failed(device, result, "cuDevicePrimaryCtxRetain", error);
  return ORT_OK;
}

static ocp_device *open_locked(bool emulated, int ordinal, ocp_error *error) {
  ocp_device *device = calloc(1, sizeof *device);
  ocp_pool *pool = ocp_pool_create();
  if (!device || !pool) {
    ocp_fail_memory(error);
  } else if (fill(device, emulated, ordinal, error) == ORT_OK) {
    device->pool = pool;
    ocp_pool_set_device_bytes(pool, device->total_bytes);
    atomic_store(&devices[emulated][ordinal], device);
    ocp_arena_attach(emulated, ordinal, pool);
    return device;
  }
  free(device);
  ocp_pool_destroy(pool);
  return NULL;
}

ocp_device *ocp_device_find(bool emulated, int ordinal) { return atomic_load(&devices[emulated][ordinal]); }

ocp_device *ocp_device_open(bool emulated, int ordinal, ocp_error *error) {
  if (ocp_device_check_ordinal(ordinal, error))
    return NULL;
  ocp_device *device = atomic_load(&devices[emulated][ordinal]);
  if (device)
    return device;
  if (atomic_load(&ocp_forked)) {
    ocp_fail(error, ORT_RUNTIME_EXCEPTION, "%s", OCP_FORKED_TEXT);
    return NULL;
  }
  ocp_watch_forks();
  pthread_mutex_lock(&devices_lock);
  device = atomic_load(&devices[emulated][ordinal]);
  if (!device)
    device = open_locked(emulated, ordinal, error);
  pthread_mutex_unlock(&devices_lock);
  return device;
}
