/* OrtNodeComputeInfo and OrtKernelImpl of a compiled cluster; runs a cluster on tensors of ORT. */
#ifndef OCP_ORT_KERNELS_COMPUTE_H
#define OCP_ORT_KERNELS_COMPUTE_H

#include "base/error.h"
#include "device/device.h"
#include "device/stream.h"
#include "python/tables.h"
#include "run/cluster.h"
#include "run/executor.h"
#include "run/instance/input.h"
#include "run/pipeline.h"
#include "run/repeat.h"

/* Makes the compute info of a fused node. The caller keeps the ownership of the cluster, which must live until
 * ocp_compute_info_release. `names`: names of the cluster's inputs for errors (copied). `positions`: indices at the
 * node of the cluster's inputs, then of its outputs (copied); NULL: the node has the same inputs and outputs in the
 * same order. NULL with the error when out of memory. */
OrtNodeComputeInfo *ocp_compute_info_create(ocp_cluster *cluster, ocp_device *device, const char *const *names,
                                            const uint32_t *positions, uint32_t num_inputs, uint32_t num_outputs,
                                            ocp_error *error);
/* Makes the compute info of a fused node that is a loop (run/repeat.h). The caller keeps the ownership of the loop. */
OrtNodeComputeInfo *ocp_compute_info_of_repeat(const ocp_repeat *repeat, ocp_device *device, const char *const *names,
                                               ocp_error *error);
/* Makes the compute info of a fused node whose stages run on several devices (run/pipeline.h). `device`: the
 * pipeline's first device. The caller keeps the ownership of the pipeline. */
OrtNodeComputeInfo *ocp_compute_info_of_pipeline(const ocp_pipeline *pipeline, ocp_device *device,
                                                 const char *const *names, ocp_error *error);
void ocp_compute_info_release(OrtNodeComputeInfo *info);

/* Makes the kernel of one node, which ORT releases. The caller keeps the ownership of the cluster, which must outlive
 * the kernel. */
OrtKernelImpl *ocp_node_kernel_create(const ocp_node_kernel_spec *spec, ocp_error *error);
/* Makes an input of a cluster from a tensor. `index` and `name` (NULL for an unnamed input) are for messages.
 * `device_memory`: the memory of the cluster's device. */
int ocp_ort_input_of(const OrtValue *value, uint32_t index, const char *name, const OrtMemoryDevice *device_memory,
                     ocp_input *input, ocp_error *error);
/* Calls ocp_cluster_run on the Run's stream. If `stream` is NULL, uses a borrowed stream, and waits for it. error->code
 * must be ORT_OK before the call. */
int ocp_ort_run_cluster(ocp_cluster *cluster, ocp_device *device, ocp_stream *stream, const ocp_input *inputs,
                        uint32_t num_inputs, ocp_output_fn output, void *output_context, ocp_error *error);

#endif
