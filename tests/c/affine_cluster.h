/* A cluster that computes y = 2 * x + 1 for float x of shape [rows, 3], for tests of CUDA graphs. */
#ifndef OCP_TESTS_AFFINE_CLUSTER_H
#define OCP_TESTS_AFFINE_CLUSTER_H

#include "check.h"
#include "device/device.h"
#include "device/stream.h"
#include "driver/driver.h"
#include "run/cluster.h"

enum { MAX_ELEMENTS = 15 };

extern ocp_device *device; /* the emulated device */
extern ocp_cluster *cluster;
extern const ocp_driver *real; /* the emulator's driver table, even if device->driver is a wrapper of it */

/* Makes the device and the cluster. `arguments`: IMAGE PLAN STREAMS SEED. IMAGE is the kernel object with the kernel
 * "affine". PLAN launches it twice: from the input to a buffer, and from the buffer to the output. STREAMS is "inline"
 * or "adversarial". */
void make_affine_cluster(char **arguments);
/* Releases the cluster, and checks that no graph and no device memory is left. */
void release_affine_cluster(void);

/* Device memory of an input and an output. */
typedef struct place {
  CUdeviceptr input, output;
} place;
place make_place(void);
void free_place(const place *where);
/* Uploads first, first + 1, ... as the input. */
void upload(ocp_stream *stream, const place *where, float first);
void run(ocp_stream *stream, place *where, int64_t rows);
/* Waits for the stream, and checks the output for the input first, first + 1, ... */
void check_result(ocp_stream *stream, const place *where, int64_t rows, float first);

#endif
