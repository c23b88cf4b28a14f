#include "device/peers/peer_access.h"

int ocp_peer_connect(ocp_device *device, ocp_device *peer, bool *is_direct, ocp_error *error) {
  const ocp_driver *driver = device->driver;
  int can_access = 0;
  *is_direct = false;
  OCP_STAY stay = ocp_device_enter(device, error);
  if (!stay.entered)
    return error->code;
  CUresult result = driver->DeviceCanAccessPeer(&can_access, device->device, peer->device);
  if (result != CUDA_SUCCESS)
    return ocp_device_fail(device, result, "cuDeviceCanAccessPeer", error);
  if (!can_access)
    return ORT_OK;
  result = driver->CtxEnablePeerAccess(peer->context, 0);
  if (result != CUDA_SUCCESS && result != CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)
    return ocp_device_fail(device, result, "cuCtxEnablePeerAccess", error);
  *is_direct = true;
  return ORT_OK;
}
