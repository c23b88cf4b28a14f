/* OrtCustomOp: declares an application's operators to ONNX Runtime, so that models with them load. The plugin claims
 * their nodes as it claims nodes of ONNX. An OrtCustomOp must have a CPU kernel, which runs the nodes that the plugin
 * declined; the plugin's CPU kernel fails with the reason for which it declined the node. */
#ifndef OCP_ORT_KERNELS_CUSTOM_OP_H
#define OCP_ORT_KERNELS_CUSTOM_OP_H

#include "base/host.h"
#include "python/tables.h"

/* Makes an operator that lives as long as the process, since sessions refer to it; NULL and the error if memory is
 * exhausted. */
const OrtCustomOp *ocp_custom_op_create(const ocp_custom_op_spec *spec, ocp_error *error);

#endif
