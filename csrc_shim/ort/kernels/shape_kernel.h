/* Kernels of Shape and Size, for nodes that are in no cluster. */
#ifndef OCP_ORT_KERNELS_SHAPE_KERNEL_H
#define OCP_ORT_KERNELS_SHAPE_KERNEL_H

#include "base/ort_abi.h"

/* An OrtKernelCreateFunc. The kernel writes its result to host memory, where nodes that compute shapes read it. It does
 * not read the input's contents. */
OrtStatus *ocp_create_shape_kernel(void *state, const OrtKernelInfo *info, OrtKernelImpl **out);

#endif
