/* A cluster that computes y = 2 * x + 1 for x float [rows, 3], for test programs about graphs. */
#ifndef OCP_TESTS_AFFINE_CLUSTER_H
#define OCP_TESTS_AFFINE_CLUSTER_H

#include "check.h"
#include "device/device.h"
#include "device/stream.h"
#include "driver/driver.h"
#include "run/cluster.h"

enum { MAX_ELEMENTS = 15 };

extern ocp_device *device; /* emulated */
extern ocp_cluster *cluster;
extern const ocp_driver *real; /* the emulator, even if device->driver is a wrapper */

/* IMAGE PLAN STREAMS SEED: PLAN does it by two launches of kernel 0 of IMAGE, "affine", the first from the input into a
 * buffer; STREAMS is inline or adversarial. */
void make_affine_cluster(char **arguments);
/* Checks that everything was freed. */
void release_affine_cluster(void);

/* Device memory for an input and an output. */
typedef struct place {
  CUdeviceptr input, output;
} place;
place make_place(void);
void free_place(const place *where);
/* Sets the input to first, first + 1, ... */
void upload(ocp_stream *stream, const place *where, float first);
void run(ocp_stream *stream, place *where, int64_t rows);
/* Waits, and checks the output for that input. */
void check_result(ocp_stream *stream, const place *where, int64_t rows, float first);

#endif
