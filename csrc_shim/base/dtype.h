/* Sizes and properties of ONNX element types (ONNXTensorElementDataType). */
#ifndef OCP_BASE_DTYPE_H
#define OCP_BASE_DTYPE_H

#include <stdbool.h>
#include <stdint.h>

/* Returns the bits of an element; 0 when the type is unknown or has no fixed size (strings). */
uint32_t ocp_dtype_bits(uint32_t dtype);
/* Returns the unsigned integer type of 1, 2, 4 or 8 bytes; 0 for another size. */
uint32_t ocp_dtype_of_bytes(uint32_t bytes);
bool ocp_dtype_is_integer(uint32_t dtype); /* true for integers of 8 to 64 bits, and for bool */

#endif
