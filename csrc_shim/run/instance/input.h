/* An input tensor of a Run. */
#ifndef OCP_RUN_INSTANCE_INPUT_H
#define OCP_RUN_INSTANCE_INPUT_H

#include <stdbool.h>
#include <stdint.h>

typedef struct ocp_input {
  const void *data;
  const int64_t *dims;
  uint32_t rank;
  uint32_t dtype; /* ONNXTensorElementDataType */
  bool on_device; /* false: in host memory; the executor uploads the tensor if the device needs it */
} ocp_input;

#endif
