#include "device/device.h"

#include "base/process.h"
#include "driver/error.h"

int ocp_device_check_ordinal(int ordinal, ocp_error *error) {
  if (ordinal < 0 || ordinal >= OCP_MAX_DEVICES)
    return ocp_fail(error, ORT_INVALID_ARGUMENT, "CUDA device %d: expected a number from 0 to %d", ordinal,
                    OCP_MAX_DEVICES - 1);
  return ORT_OK;
}

int ocp_device_check(const ocp_device *device, ocp_error *error) {
  if (atomic_load_explicit(&ocp_forked, memory_order_relaxed))
    return ocp_fail(error, ORT_RUNTIME_EXCEPTION, "%s", OCP_FORKED_TEXT);
  CUresult lost = atomic_load_explicit(&device->lost, memory_order_relaxed);
  if (lost == CUDA_SUCCESS)
    return ORT_OK;
  ocp_error earlier;
  ocp_fail_cuda(&earlier, device->driver, lost, "an earlier operation");
  return ocp_fail(error, ORT_RUNTIME_EXCEPTION, "CUDA device %d is lost, restart the process: %.800s", device->ordinal,
                  earlier.text);
}

/* Makes the device's context current. Queries the current context each time, because other CUDA users of the process
 * (PyTorch, CuPy) change it. */
static CUresult make_current(const ocp_device *device, ocp_stay *stay) {
  CUcontext current = NULL;
  const bool known = device->driver->CtxGetCurrent(&current) == CUDA_SUCCESS;
  if (known && current == device->context)
    return CUDA_SUCCESS;
  const CUresult result = device->driver->CtxSetCurrent(device->context);
  if (known && result == CUDA_SUCCESS)
    stay->driver = device->driver, stay->before = current;
  return result;
}

/* The capture mode that the calling thread's open stays (stay.h) have set; driver NULL: no stay has set one. With it, a
 * stay inside another one can tell without a driver call that the mode is relaxed enough already. */
static _Thread_local ocp_capture_mode mode_in_stays;

static _Thread_local bool in_foreign_capture;

void ocp_device_in_foreign_capture(bool is_captured) { in_foreign_capture = is_captured; }

/* Sets the thread's capture mode to `mode`, unless the application has set a more relaxed mode: then that mode stays.
 */
static CUresult relax_captures(const ocp_device *device, int mode, ocp_stay *stay) {
  const ocp_driver *driver = device->driver;
  if (mode_in_stays.driver == driver && mode_in_stays.mode >= mode)
    return CUDA_SUCCESS;
  ocp_capture_mode before = {driver, mode};
  CUresult result = driver->ThreadExchangeStreamCaptureMode(&before.mode);
  if (result != CUDA_SUCCESS)
    return result;
  stay->mode_before = before;
  stay->outer = mode_in_stays;
  mode_in_stays = (ocp_capture_mode){driver, mode};
  if (before.mode > mode) {
    mode_in_stays.mode = before.mode;
    result = driver->ThreadExchangeStreamCaptureMode(&before.mode);
  }
  return result;
}

ocp_stay ocp_device_enter(ocp_device *device, ocp_error *error) {
  ocp_stay stay = {0};
  if (ocp_device_check(device, error) != ORT_OK)
    return stay;
  const char *call = "cuCtxSetCurrent";
  CUresult result = make_current(device, &stay);
  if (result == CUDA_SUCCESS) {
    call = "cuThreadExchangeStreamCaptureMode";
    const int mode = in_foreign_capture ? CU_STREAM_CAPTURE_MODE_RELAXED : CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    result = relax_captures(device, mode, &stay);
  }
  stay.entered = result == CUDA_SUCCESS;
  if (stay.entered)
    return stay;
  ocp_device_fail(device, result, call, error);
  ocp_device_leave(&stay);
  return stay;
}

ocp_stay ocp_device_enter_to_release(const ocp_device *device) {
  ocp_stay stay = {0};
  /* Tries twice: if both fail, the resource that the caller wants to release stays allocated until the process ends. */
  stay.entered = !atomic_load(&ocp_forked) &&
                 (make_current(device, &stay) == CUDA_SUCCESS || make_current(device, &stay) == CUDA_SUCCESS);
  if (stay.entered)
    relax_captures(device, CU_STREAM_CAPTURE_MODE_RELAXED, &stay); /* if it fails, most calls still succeed */
  return stay;
}

static void restore_mode(const ocp_stay *stay) {
  const ocp_driver *driver = stay->mode_before.driver;
  int mode = stay->mode_before.mode;
  if (driver->ThreadExchangeStreamCaptureMode(&mode) != CUDA_SUCCESS) { /* tries twice: nothing restores it later */
    mode = stay->mode_before.mode;
    driver->ThreadExchangeStreamCaptureMode(&mode);
  }
  mode_in_stays = stay->outer;
}

void ocp_device_leave(ocp_stay *stay) {
  if (stay->mode_before.driver)
    restore_mode(stay);
  stay->mode_before.driver = NULL;
  if (!stay->driver)
    return;
  if (stay->driver->CtxSetCurrent(stay->before) != CUDA_SUCCESS) /* tries twice: no later call restores the context */
    stay->driver->CtxSetCurrent(stay->before);
  stay->driver = NULL;
}

/* Whether the error is sticky: every later call on the context fails with it, until the process ends. */
static bool is_sticky(CUresult result) {
  switch (result) {
  case CUDA_ERROR_ILLEGAL_ADDRESS:
  case CUDA_ERROR_LAUNCH_FAILED:
  case 214: /* CUDA_ERROR_ECC_UNCORRECTABLE */
  case CUDA_ERROR_LAUNCH_TIMEOUT:
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
