/* Kernels of If, Loop and Scan. ORT implements the kernels; this file implements the device helpers that they call. */
#ifndef OCP_ORT_KERNELS_CONTROL_FLOW_H
#define OCP_ORT_KERNELS_CONTROL_FLOW_H

#include "base/host.h"

/* Adds If, Loop and Scan for every opset that defines them, except Scan of opset 8, for which ORT offers no kernel. */
OrtStatus *ocp_ort_add_control_flow(OrtKernelRegistry *registry, ocp_identity identity);

#endif
