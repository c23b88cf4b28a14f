/* Weights: device copies of constants, keyed by device and content, shared by all clusters, reference counted. */
#ifndef OCP_DEVICE_MEMORY_WEIGHTS_H
#define OCP_DEVICE_MEMORY_WEIGHTS_H

#include "base/error.h"
#include "device/device.h"
#include "driver/driver.h"

typedef struct ocp_weight ocp_weight;

/* Returns the shared device copy of the bytes (`data`: host memory) with a reference for the caller; uploads them
 * synchronously if the device has no copy yet. */
int ocp_weight_acquire(ocp_device *device, const void *data, size_t bytes, ocp_weight **out, ocp_error *error);
/* Creates a weight that is not shared, because Runs or a precomputation write it. `data`: its initial contents; NULL:
 * undefined. */
int ocp_weight_create_state(ocp_device *device, const void *data, size_t bytes, ocp_weight **out, ocp_error *error);
void ocp_weight_release(ocp_weight *weight);
CUdeviceptr ocp_weight_address(const ocp_weight *weight);
size_t ocp_weight_bytes(const ocp_weight *weight);

#endif
