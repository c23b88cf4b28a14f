/* The devices of the process, by kind (CUDA, emulated) and ordinal. Each is opened on first use. */
#ifndef OCP_DEVICE_OPEN_DEVICES_H
#define OCP_DEVICE_OPEN_DEVICES_H

#include "base/error.h"
#include "device/device.h"

/* Vendor ids of OrtMemoryDevices. PCI vendor ids have 16 bits, so no EP for real hardware has the emulated
 * device's id. */
enum { OCP_VENDOR_NVIDIA = 0x10DE, OCP_VENDOR_EMULATED = 0x10DE0E };
/* Returns the vendor id of the device's memory. In a process that sees no GPU, the emulated device has NVIDIA's id, so
 * that "cuda" in IO binding and DLPack means the emulated device. In a process that sees a GPU, the emulated device has
 * its own id. The id does not change while the process lives. */
uint32_t ocp_vendor_id(bool emulated);

/* Returns the device with that ordinal, or NULL with the error. The first call opens the device, which then stays open.
 * Thread safe. */
ocp_device *ocp_device_open(bool emulated, int ordinal, ocp_error *error);
/* Returns the device if it is open already, else NULL. */
ocp_device *ocp_device_find(bool emulated, int ordinal);

#endif
