/* OrtCustomOp: declares an application's operators to ONNX Runtime, so that models with them load. The plugin claims
 * such nodes like others. An OrtCustomOp must have a CPU kernel, which gets the nodes that the plugin declined: ours
 * fails with the reason. */
#ifndef OCP_ORT_KERNELS_CUSTOM_OP_H
#define OCP_ORT_KERNELS_CUSTOM_OP_H

#include "base/host.h"
#include "python/tables.h"

/* Lives as long as the process, since sessions refer to it; NULL and the error if memory is exhausted. */
const OrtCustomOp *ocp_custom_op_create(const ocp_custom_op_spec *spec, ocp_error *error);

#endif
