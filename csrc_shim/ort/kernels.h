/* The kernel registry of the EP. */
#ifndef OCP_ORT_KERNELS_H
#define OCP_ORT_KERNELS_H

#include "base/error.h"

/* For OrtEp::GetKernelRegistry: MemcpyFromHost and MemcpyToHost for every tensor type. One for the process, made on
 * first use and never released, since sessions refer to it. */
int ocp_kernel_registry(const OrtKernelRegistry **out, ocp_error *error);

#endif
