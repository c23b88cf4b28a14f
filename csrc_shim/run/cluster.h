/* Clusters: their plans, and the handles that plans refer to by index. */
#ifndef OCP_RUN_CLUSTER_H
#define OCP_RUN_CLUSTER_H

#include "base/error.h"
#include "device/device.h"
#include "device/memory/weights.h"
#include "driver/driver.h"
#include "run/instance/handles.h"
#include "vendor/problem.h"

/* Makes a cluster for `device`; NULL: out of host memory. `name`: for errors (copied). `build` is called with `handle`
 * when no plan matches the inputs of a Run. */
ocp_cluster *ocp_cluster_create(ocp_device *device, const char *name, ocp_build_fn build, int64_t handle);
void ocp_cluster_release(ocp_cluster *cluster);
/* Append kernels, weights, or a library problem; return the index of the first new one, or -1 with the error. */
int ocp_cluster_add_kernels(ocp_cluster *cluster, const ocp_kernel_ref *kernels, uint32_t count, ocp_error *error);
int ocp_cluster_add_weights(ocp_cluster *cluster, ocp_weight *const *weights, uint32_t count, ocp_error *error);
int ocp_cluster_add_problem(ocp_cluster *cluster, ocp_problem *problem, ocp_error *error);
/* Appends a callback with num_pointers addresses and num_numbers numbers; `call` gets the cluster's handle and the
 * callback's index. Returns the index, or -1 with the error. */
int ocp_cluster_add_callback(ocp_cluster *cluster, ocp_call_fn call, uint32_t num_pointers, uint32_t num_numbers,
                             ocp_error *error);
/* Sets the host inputs: inputs whose values decide shapes. Each Run reads them to the host before it evaluates guards.
 * `inputs`: indices, ascending, at most OCP_MAX_HOST_INPUTS. Must be called before the first plan is added. */
int ocp_cluster_set_host_inputs(ocp_cluster *cluster, const uint32_t *inputs, uint32_t count, ocp_error *error);
/* Sets the host inputs whose elements depend on elements of the model's inputs. Replays of a captured Run would use the
 * elements that the host read during the capture, so a Run of this cluster fails while its stream is being captured.
 * The elements of other host inputs depend only on shapes. Must be called before the first Run. */
int ocp_cluster_set_fed_inputs(ocp_cluster *cluster, const uint32_t *inputs, uint32_t count, ocp_error *error);
/* Sets when instances get CUDA graphs: after `warm_runs` Runs (at most OCP_MAX_WARM_RUNS). The cluster has at most
 * `max_graphs` graphs; a new one replaces the least recently used one that no Run is using. Until this call max_graphs
 * is 0: no graphs. Runs of the cluster may be in progress on other threads. */
#define OCP_MAX_WARM_RUNS 1000u
void ocp_cluster_set_graphs(ocp_cluster *cluster, uint32_t warm_runs, uint32_t max_graphs);
/* Releases the graphs that no Run is using, and their memory; the library does the same when memory runs out. Later
 * Runs make new graphs once their instances are warm. */
void ocp_cluster_release_graphs(ocp_cluster *cluster);
/* Checks and adds one plan. A Run tries the newest plans first. Runs may be in progress on other threads. */
int ocp_cluster_add_plan(ocp_cluster *cluster, const void *blob, size_t bytes, ocp_error *error);

#endif
