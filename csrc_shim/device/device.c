/* Devices: opened once, made current per thread, marked lost by sticky errors. */
#include <pthread.h>
#include <stdlib.h>

#include "device/pool.h"

static pthread_mutex_t devices_lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic(ocp_device *) devices[2]
                                    [OCP_MAX_DEVICES]; /* by kind and ordinal; written under the lock, never cleared */

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
  return ocp_fail_cuda(error, device->driver, result, what);
}

static int fill(ocp_device *device, bool emulated, int ordinal, ocp_error *error) {
  const char *why = NULL;
  const ocp_driver *driver = emulated ? ocp_driver_emulator() : ocp_driver_cuda(&why);
  if (!driver)
    return ocp_fail(error, ORT_EP_FAIL, "no CUDA driver: %s", why);
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
    return ocp_fail(error, ORT_INVALID_ARGUMENT, "there is no %s %d: %d found",
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
    ocp_fail(error, ORT_FAIL, "out of host memory");
  } else if (fill(device, emulated, ordinal, error) == ORT_OK) {
    device->pool = pool;
    ocp_pool_set_device_bytes(pool, device->total_bytes);
    atomic_store(&devices[emulated][ordinal], device);
    for (int memory = 0; memory < OCP_NUM_MEMORIES; memory++)
      ocp_arena_apply(emulated, ordinal, memory);
    return device;
  }
  free(device);
  ocp_pool_destroy(pool);
  return NULL;
}

ocp_device *ocp_device_find(bool emulated, int ordinal) { return atomic_load(&devices[emulated][ordinal]); }

ocp_device *ocp_device_open(bool emulated, int ordinal, ocp_error *error) {
  if (ordinal < 0 || ordinal >= OCP_MAX_DEVICES) {
    ocp_fail(error, ORT_INVALID_ARGUMENT, "there is no CUDA device %d", ordinal);
    return NULL;
  }
  ocp_device *device = atomic_load(&devices[emulated][ordinal]);
  if (device)
    return device;
  if (atomic_load(&ocp_forked)) {
    ocp_fail(error, ORT_EP_FAIL, "%s", OCP_FORKED_TEXT);
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

int ocp_device_check(const ocp_device *device, ocp_error *error) {
  if (atomic_load_explicit(&ocp_forked, memory_order_relaxed))
    return ocp_fail(error, ORT_EP_FAIL, "%s", OCP_FORKED_TEXT);
  CUresult lost = atomic_load_explicit(&device->lost, memory_order_relaxed);
  if (lost == CUDA_SUCCESS)
    return ORT_OK;
  ocp_error earlier;
  ocp_fail_cuda(&earlier, device->driver, lost, "an earlier operation");
  return ocp_fail(error, ORT_EP_FAIL, "CUDA device %d is lost, restart the process: %.800s", device->ordinal,
                  earlier.text);
}

/* Asked each time, since other CUDA users of the process (PyTorch, CuPy) change it on the same thread. */
static CUresult make_current(const ocp_device *device) {
  CUcontext current = NULL;
  if (device->driver->CtxGetCurrent(&current) == CUDA_SUCCESS && current == device->context)
    return CUDA_SUCCESS;
  return device->driver->CtxSetCurrent(device->context);
}

int ocp_device_enter(ocp_device *device, ocp_error *error) {
  if (ocp_device_check(device, error) != ORT_OK)
    return error->code;
  const CUresult result = make_current(device);
  return result == CUDA_SUCCESS ? ORT_OK : ocp_device_fail(device, result, "cuCtxSetCurrent", error);
}

bool ocp_device_enter_to_release(const ocp_device *device) {
  /* Twice, since nobody comes back for what stays. */
  return !atomic_load(&ocp_forked) && (make_current(device) == CUDA_SUCCESS || make_current(device) == CUDA_SUCCESS);
}

/* Errors after which every call on the context fails until the process ends. */
static bool is_sticky(CUresult result) {
  switch (result) {
  case CUDA_ERROR_ILLEGAL_ADDRESS:
  case CUDA_ERROR_LAUNCH_FAILED:
  case 214: /* CUDA_ERROR_ECC_UNCORRECTABLE */
  case 702: /* CUDA_ERROR_LAUNCH_TIMEOUT */
  case 710: /* CUDA_ERROR_ASSERT */
  case 714: /* CUDA_ERROR_HARDWARE_STACK_ERROR */
  case 715: /* CUDA_ERROR_ILLEGAL_INSTRUCTION */
  case 716: /* CUDA_ERROR_MISALIGNED_ADDRESS */
  case 717: /* CUDA_ERROR_INVALID_ADDRESS_SPACE */
  case 718: /* CUDA_ERROR_INVALID_PC */
    return true;
  default:
    return false;
  }
}

int ocp_device_fail(ocp_device *device, CUresult result, const char *what, ocp_error *error) {
  if (is_sticky(result)) {
    int healthy = CUDA_SUCCESS;
    atomic_compare_exchange_strong(&device->lost, &healthy, result);
  }
  return ocp_fail_cuda(error, device->driver, result, what);
}
