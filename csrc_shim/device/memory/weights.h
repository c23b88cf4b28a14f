/* Weights: copies of constants in device memory, or in pinned host memory for Runs to stream to the device; keyed by
 * device and content, shared by all clusters, reference counted. */
#ifndef OCP_DEVICE_MEMORY_WEIGHTS_H
#define OCP_DEVICE_MEMORY_WEIGHTS_H

#include "base/error.h"
#include "device/device.h"
#include "driver/driver.h"

typedef struct ocp_weight ocp_weight;

/* The memory of a weight. Kernels read weights in device memory; Runs upload those in host memory (pinned) first. */
typedef enum ocp_weight_memory { OCP_WEIGHT_ON_DEVICE, OCP_WEIGHT_ON_HOST } ocp_weight_memory;

/* Returns the shared copy of the bytes (`data`: host memory) in that memory, with a reference for the caller; copies
 * them synchronously if there is no copy yet. */
int ocp_weight_acquire(ocp_device *device, ocp_weight_memory memory, const void *data, size_t bytes, ocp_weight **out,
                       ocp_error *error);
/* Creates a weight that is not shared, because Runs or a precomputation write it. `data`: its initial contents; NULL:
 * undefined. */
int ocp_weight_create_state(ocp_device *device, const void *data, size_t bytes, ocp_weight **out, ocp_error *error);
/* Moves a weight that is not shared and not yet in use from device memory to pinned host memory, and waits for the
 * copy. No work may be using the weight. */
int ocp_weight_move_to_host(ocp_weight *weight, ocp_error *error);
void ocp_weight_release(ocp_weight *weight);
/* The address of a weight in host memory is that of the pinned copy. */
CUdeviceptr ocp_weight_address(const ocp_weight *weight);
ocp_weight_memory ocp_weight_memory_of(const ocp_weight *weight);
size_t ocp_weight_bytes(const ocp_weight *weight);

#endif
