/* Attention by cuDNN. */
#ifndef OCP_VENDOR_ATTENTION_H
#define OCP_VENDOR_ATTENTION_H

#include "vendor/library.h"

extern const ocp_library ocp_cudnn_attention;

#endif
