/* Kernels of Shape and Size for nodes that ORT runs one by one. */
#ifndef OCP_ORT_KERNELS_SHAPE_KERNEL_H
#define OCP_ORT_KERNELS_SHAPE_KERNEL_H

#include "base/ort_abi.h"

/* An OrtKernelCreateFunc. The result is in host memory, where nodes that compute shapes read it; the input's contents
 * are not touched. */
OrtStatus *ocp_create_shape_kernel(void *state, const OrtKernelInfo *info, OrtKernelImpl **out);

#endif
