/* The kernel registry of the EP. */
#ifndef OCP_ORT_KERNELS_KERNELS_H
#define OCP_ORT_KERNELS_KERNELS_H

#include "base/host.h"

/* Answers OrtEp::GetKernelRegistry. There is one registry for each name of the EP and each set of custom operators; it
 * is created on first use and never released, since sessions refer to it. */
int ocp_kernel_registry(ocp_identity identity, int64_t operators, const OrtKernelRegistry **out, ocp_error *error);
/* An OrtKernelCreateFunc that lets Python compile the node. */
OrtStatus *ocp_create_node_kernel(void *state, const OrtKernelInfo *info, OrtKernelImpl **out);

#endif
