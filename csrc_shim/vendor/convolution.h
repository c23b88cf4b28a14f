/* Convolutions by cuDNN. */
#ifndef OCP_VENDOR_CONVOLUTION_H
#define OCP_VENDOR_CONVOLUTION_H

#include "vendor/library.h"

extern const ocp_library ocp_cudnn;

#endif
