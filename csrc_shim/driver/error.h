/* Errors of driver calls: name, code and text of a CUresult. */
#ifndef OCP_DRIVER_ERROR_H
#define OCP_DRIVER_ERROR_H

#include "base/error.h"
#include "driver/driver.h"

/* Formats "cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY (2: out of memory)" and sets the matching ORT code. */
int ocp_fail_cuda(ocp_error *error, const ocp_driver *driver, CUresult result, const char *what) __attribute__((cold));

#endif
