/* What the drivers tell of devices before one is opened. */
#ifndef OCP_DEVICE_DEVICE_LIST_H
#define OCP_DEVICE_DEVICE_LIST_H

#include "base/error.h"

typedef struct ocp_device_info {
  int emulated, ordinal; /* emulated devices are counted on their own */
  char name[256];
  int cc_major, cc_minor;
  uint64_t memory_bytes;
  int driver_version;  /* the CUDA version, 1000 * major + 10 * minor */
  char pci_bus_id[32]; /* as 0000:65:00.0; empty for emulated devices */
  int multiprocessors; /* of an emulated device: workers */
  int max_shared_bytes;
} ocp_device_info;

enum { OCP_DEVICE_METADATA = 13 };
/* One of a device's entries in OrtEpDevice's metadata. */
typedef struct ocp_device_metadata {
  const char *key; /* static */
  char value[256];
} ocp_device_metadata;

/* The devices of a kind, as many as there is room for; *count says how many there are. Fails where the driver is
 * missing, too old or broken. */
int ocp_list_devices(int emulated, ocp_device_info *infos, uint32_t room, uint32_t *count, ocp_error *error);
void ocp_describe_device(const ocp_device_info *info, ocp_device_metadata entries[]); /* of OCP_DEVICE_METADATA */

#endif
