/* The driver table over NVIDIA's libcuda.so.1. */
#ifndef OCP_DRIVER_CUDA_H
#define OCP_DRIVER_CUDA_H

#include "driver/driver.h"

/* Returns the driver table of libcuda.so.1, or NULL with the reason (which library, which symbol) in *why. Thread
 * safe; resolved once. */
const ocp_driver *ocp_driver_cuda(const char **why);

#endif
