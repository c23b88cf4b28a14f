/* Matrix products by cuBLASLt. */
#ifndef OCP_VENDOR_CUBLASLT_H
#define OCP_VENDOR_CUBLASLT_H

#include "vendor/library.h"

extern const ocp_library ocp_cublaslt;

#endif
