/* OrtCustomOp: what tells ONNX Runtime of an application's operators, so that it loads models with them.
 *
 * The plugin claims such nodes as it claims others. The kernel that an OrtCustomOp must have belongs to the CPU
 * provider, which gets the nodes that the plugin declined: it says why they were. */
#ifndef OCP_ORT_KERNELS_CUSTOM_OP_H
#define OCP_ORT_KERNELS_CUSTOM_OP_H

#include "base/host.h"
#include "python/tables.h"

/* Lives as long as the process, as sessions refer to it; NULL and the error where memory is lacking. */
const OrtCustomOp *ocp_custom_op_create(const ocp_custom_op_spec *spec, ocp_error *error);

#endif
