/* The hot path: evaluates a plan of a cluster for the inputs of one Run, and enqueues the work. Needs neither the GIL
 * nor Python, except when no variant matches, for new library algorithms or refused library calls, and in callbacks.
 * Independent of ORT's kernel context, so that tests call it directly; ort/kernels/compute.c calls it for
 * OrtNodeComputeInfo. */
#ifndef OCP_RUN_EXECUTOR_H
#define OCP_RUN_EXECUTOR_H

#include "base/error.h"
#include "device/stream.h"
#include "run/cluster.h"
#include "run/instance/input.h"

/* Allocates output `index` with these dimensions: *data is its memory on the cluster's device. Returns 0, or an error
 * code. */
typedef int (*ocp_output_fn)(void *context, uint32_t index, const int64_t *dims, uint32_t rank, void **data,
                             ocp_error *error);

/* Executes the cluster once: enqueues its work on the stream, and waits for the stream only to read values to the host.
 * When no plan matches, one thread calls the cluster's builder; other threads that need a plan wait, without a lock
 * that the builder could need. Calls may be concurrent, with inputs of different shapes. */
int ocp_cluster_run(ocp_cluster *cluster, ocp_stream *stream, const ocp_input *inputs, uint32_t num_inputs,
                    ocp_output_fn output, void *output_context, ocp_error *error);

#endif
