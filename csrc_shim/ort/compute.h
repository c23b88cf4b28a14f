/* OrtNodeComputeInfo and OrtKernelImpl of a compiled cluster. */
#ifndef OCP_ORT_COMPUTE_H
#define OCP_ORT_COMPUTE_H

#include "base/error.h"
#include "device/device.h"
#include "python/tables.h"
#include "run/cluster.h"

/* The compute info of a fused node. Inputs and outputs of the cluster are those of the fused node, in its order. The
 * cluster stays the caller's, and must live until ocp_compute_info_release. NULL with the error when out of memory. */
OrtNodeComputeInfo *ocp_compute_info_create(ocp_cluster *cluster, ocp_device *device, uint32_t num_inputs,
                                            ocp_error *error);
void ocp_compute_info_release(OrtNodeComputeInfo *info);

/* The kernel of one node, for ORT to release; the cluster stays the caller's, and must live until then. */
OrtKernelImpl *ocp_node_kernel_create(const ocp_node_kernel_spec *spec, ocp_error *error);

#endif
