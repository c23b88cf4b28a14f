/* The kernel registry of the EP. */
#ifndef OCP_ORT_KERNELS_H
#define OCP_ORT_KERNELS_H

#include "base/host.h"

/* For OrtEp::GetKernelRegistry: MemcpyFromHost and MemcpyToHost for every tensor type. One for each name of
 * the EP, made on first use and never released, since sessions refer to it. */
int ocp_kernel_registry(ocp_identity identity, const OrtKernelRegistry **out, ocp_error *error);

#endif
