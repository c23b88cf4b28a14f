#include "ort/data/place.h"

#include "base/host.h"
#include "device/open/devices.h"

ocp_place ocp_ort_place(const OrtMemoryDevice *memory_device) {
  OrtMemoryInfoDeviceType type = ocp_ep_api->MemoryDevice_GetDeviceType(memory_device);
  if (type == OrtMemoryInfoDeviceType_CPU)
    return (ocp_place){.kind = OCP_PLACE_HOST};
  uint32_t vendor = ocp_ep_api->MemoryDevice_GetVendorId(memory_device);
  if (type != OrtMemoryInfoDeviceType_GPU || (vendor != OCP_VENDOR_NVIDIA && vendor != OCP_VENDOR_EMULATED))
    return (ocp_place){.kind = OCP_PLACE_FOREIGN};
  ocp_place result = {.emulated = vendor == OCP_VENDOR_EMULATED || vendor == ocp_vendor_id(/*emulated=*/true),
                      .ordinal = (int)ocp_ep_api->MemoryDevice_GetDeviceId(memory_device)};
  switch (ocp_ep_api->MemoryDevice_GetMemoryType(memory_device)) {
  case OrtDeviceMemoryType_DEFAULT:
    result.kind = OCP_PLACE_DEVICE;
    return result;
  case OrtDeviceMemoryType_HOST_ACCESSIBLE:
    result.kind = OCP_PLACE_PINNED;
    return result;
  default:
    return (ocp_place){.kind = OCP_PLACE_FOREIGN};
  }
}
