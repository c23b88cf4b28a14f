/* The hot path: evaluates a plan for one call and enqueues it. No GIL and no Python, except when no variant matches.
 * Independent of ORT's kernel context, so that tests drive it directly; ort/compute.c adapts OrtNodeComputeInfo to it.
 */
#ifndef OCP_RUN_EXECUTOR_H
#define OCP_RUN_EXECUTOR_H

#include "device/memory.h"

#define OCP_MAX_HOST_INPUTS 256u

typedef struct ocp_input {
  const void *data;
  const int64_t *dims;
  uint32_t rank;
  uint32_t dtype; /* ONNXTensorElementDataType */
  bool on_device; /* false: a host pointer (ORT can hand one over); the executor copies it up first, counted */
} ocp_input;

/* Gives the memory of output `index` for these dimensions (device memory of the cluster's device). Returns 0, or an
 * error code. */
typedef int (*ocp_output_fn)(void *context, uint32_t index, const int64_t *dims, uint32_t rank, void **data,
                             ocp_error *error);

/* What a cluster refers to by index. Weights are the cluster's once added; functions and problems stay the caller's,
 * who keeps them until the cluster is released. */
typedef struct ocp_kernel_ref {
  CUfunction function;
  const char *name; /* copied */
  uint32_t num_params;
  const uint8_t *params; /* the ocp_param_kind of each; copied */
} ocp_kernel_ref;

/* Makes a cluster for `device` with a name for errors (copied). python_handle identifies it in build_variant. */
ocp_cluster *ocp_cluster_create(ocp_device *device, const char *name, int64_t python_handle);
void ocp_cluster_release(ocp_cluster *cluster);
/* Appends kernels / weights / library problems; returns the index of the first new one, or -1 with the error. */
int ocp_cluster_add_kernels(ocp_cluster *cluster, const ocp_kernel_ref *kernels, uint32_t count, ocp_error *error);
int ocp_cluster_add_weights(ocp_cluster *cluster, ocp_weight *const *weights, uint32_t count, ocp_error *error);
int ocp_cluster_add_problem(ocp_cluster *cluster, struct ocp_problem *problem, ocp_error *error);
/* Which inputs are read back before the guards of any plan are evaluated (fixed for the cluster): their indices,
 * ascending, at most OCP_MAX_HOST_INPUTS. Before the first plan. */
int ocp_cluster_set_host_inputs(ocp_cluster *cluster, const uint32_t *inputs, uint32_t count, ocp_error *error);
/* CUDA graphs: an instance of a plan that has run `warm_runs` times (at most OCP_MAX_WARM_RUNS count) becomes a graph;
 * the cluster keeps at most `max_graphs`, none when 0, as after creation. Before the first Run. */
#define OCP_MAX_WARM_RUNS 1000u
void ocp_cluster_set_graphs(ocp_cluster *cluster, uint32_t warm_runs, uint32_t max_graphs);
/* Releases the graphs that no Run is using, and with them their memory, as happens where that runs out. Runs go on, and
 * make graphs again when they are warm. */
void ocp_cluster_release_graphs(ocp_cluster *cluster);
/* Checks and adds one plan. Later plans are tried first. Safe beside concurrent Runs. */
int ocp_cluster_add_plan(ocp_cluster *cluster, const void *blob, size_t bytes, ocp_error *error);
/* One Run. Enqueues on stream and returns before the work ends. Concurrent calls are fine. When no plan matches, calls
 * ocp_python.build_variant once (single flight: other threads with the same need wait without any lock that Python
 * could want) and tries again. The inputs of concurrent Runs may differ in shape. */
int ocp_cluster_run(ocp_cluster *cluster, ocp_stream *stream, const ocp_input *inputs, uint32_t num_inputs,
                    ocp_output_fn output, void *output_context, ocp_error *error);

/* What the intermediate tensors of the last Run took, over its segments; false when there is none, or it is running. */
typedef struct ocp_plan_memory {
  uint64_t planned;       /* bytes of the slabs */
  uint64_t alive_at_once; /* bytes of the largest set of tensors that had to be there at one time: no plan needs less */
} ocp_plan_memory;
bool ocp_cluster_memory(ocp_cluster *cluster, ocp_plan_memory *memory);

/* ---- weights: device copies of constants, keyed by device and content, shared by all clusters, reference counted ----
 */
/* Hashes the bytes, finds or uploads them (synchronously). */
int ocp_weight_acquire(ocp_device *device, const void *data, size_t bytes, ocp_weight **out, ocp_error *error);
/* A weight that no other user gets, because Runs write it: `data` is what it holds at first. */
int ocp_weight_create_state(ocp_device *device, const void *data, size_t bytes, ocp_weight **out, ocp_error *error);
void ocp_weight_release(ocp_weight *weight);
CUdeviceptr ocp_weight_address(const ocp_weight *weight);
size_t ocp_weight_bytes(const ocp_weight *weight);

#endif
