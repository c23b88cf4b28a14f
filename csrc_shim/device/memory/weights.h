/* Weights: copies of constants in device memory, or in pinned host memory for Runs to stream to the device; keyed by
 * device, memory and content, shared by all clusters, reference counted. */
#ifndef OCP_DEVICE_MEMORY_WEIGHTS_H
#define OCP_DEVICE_MEMORY_WEIGHTS_H

#include "base/error.h"
#include "device/device.h"
#include "driver/driver.h"

typedef struct ocp_weight ocp_weight;

/* The memory of a weight. Records read weights in device memory. A Run first uploads the weights that are in pinned
 * host memory. */
typedef enum ocp_weight_memory { OCP_WEIGHT_ON_DEVICE, OCP_WEIGHT_ON_HOST } ocp_weight_memory;

/* Returns the shared copy in `memory` of the bytes (`data`: host memory), with a reference for the caller. Copies the
 * bytes synchronously if there is no copy yet. */
int ocp_weight_acquire(ocp_device *device, ocp_weight_memory memory, const void *data, size_t bytes, ocp_weight **out,
                       ocp_error *error);
/* Creates a weight that is not shared, because Runs or a precomputation write it. `data`: its initial contents; NULL:
 * undefined. */
int ocp_weight_create_state(ocp_device *device, const void *data, size_t bytes, ocp_weight **out, ocp_error *error);
/* Moves a weight that is not shared from device memory to pinned host memory, and waits for the copy. No enqueued work
 * may use the weight. */
int ocp_weight_move_to_host(ocp_weight *weight, ocp_error *error);
void ocp_weight_release(ocp_weight *weight);
/* Returns the address of a weight: a device address, or the host's address if the weight is in host memory. */
CUdeviceptr ocp_weight_address(const ocp_weight *weight);
ocp_weight_memory ocp_weight_memory_of(const ocp_weight *weight);
size_t ocp_weight_bytes(const ocp_weight *weight);

#endif
