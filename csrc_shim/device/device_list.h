/* Enumerates the CUDA and emulated devices, and reads their properties, without creating a context. */
#ifndef OCP_DEVICE_DEVICE_LIST_H
#define OCP_DEVICE_DEVICE_LIST_H

#include "base/error.h"

typedef struct ocp_device_info {
  int emulated, ordinal; /* emulated devices have ordinals of their own, from 0 */
  char name[256];
  int cc_major, cc_minor;
  uint64_t memory_bytes;
  int driver_version;  /* the CUDA version, 1000 * major + 10 * minor */
  char pci_bus_id[32]; /* as 0000:65:00.0; empty for emulated devices */
  int multiprocessors; /* for an emulated device the number of host threads that run its blocks */
  int max_shared_bytes;
} ocp_device_info;

enum { OCP_DEVICE_METADATA = 13 };
/* One entry of the metadata of a device, which applications read from ONNX Runtime's OrtEpDevice. */
typedef struct ocp_device_metadata {
  const char *key; /* a string literal */
  char value[256];
} ocp_device_metadata;

/* Lists the CUDA devices that kernels can be compiled for, or the emulated ones. Writes at most `room` entries; *count
 * is the number of devices, even if it exceeds `room`. Fails if the driver is missing, too old, or reports an error, or
 * if all GPUs are too old. error->text names the GPUs that are too old, even if the call succeeds because of other
 * GPUs. */
int ocp_list_devices(int emulated, ocp_device_info *infos, uint32_t room, uint32_t *count, ocp_error *error);
/* Fills the OCP_DEVICE_METADATA entries of a device's metadata. */
void ocp_describe_device(const ocp_device_info *info, ocp_device_metadata entries[]);

#endif
