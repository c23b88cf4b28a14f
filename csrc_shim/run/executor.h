/* The hot path: evaluates a plan for one call and enqueues it. Needs neither the GIL nor Python, except when no
 * variant matches. Independent of ORT's kernel context, so that tests drive it directly; ort/kernels/compute.c
 * adapts OrtNodeComputeInfo to it. */
#ifndef OCP_RUN_EXECUTOR_H
#define OCP_RUN_EXECUTOR_H

#include "base/error.h"
#include "device/stream.h"
#include "run/cluster.h"
#include "run/instance/input.h"

/* Returns the memory of output `index` for these dimensions (device memory of the cluster's device). Returns 0, or
 * an error code. */
typedef int (*ocp_output_fn)(void *context, uint32_t index, const int64_t *dims, uint32_t rank, void **data,
                             ocp_error *error);

/* Executes one Run: enqueues it on the stream and returns before the work ends. Concurrent calls are safe. When no
 * plan matches, calls the cluster's builder once (single flight: other threads with the same need wait without any
 * lock that the builder could want) and tries again. The inputs of concurrent Runs may differ in shape. */
int ocp_cluster_run(ocp_cluster *cluster, ocp_stream *stream, const ocp_input *inputs, uint32_t num_inputs,
                    ocp_output_fn output, void *output_context, ocp_error *error);

#endif
