#include "vendor/compare.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"

/* Returns the number of bytes from the result's first element to the end of its last one; 0 if there is no element, or
 * if the number overflows. */
static uint64_t extent(const ocp_problem_spec *spec, const ocp_result *r) {
  int64_t groups, rows, elements, bytes;
  if (r->groups <= 0 || r->rows <= 0 || r->columns <= 0 ||
      __builtin_mul_overflow(r->groups - 1, r->group_stride, &groups) ||
      __builtin_mul_overflow(r->rows - 1, r->row_stride, &rows) || __builtin_add_overflow(groups, rows, &elements) ||
      __builtin_add_overflow(elements, r->columns, &elements) ||
      __builtin_mul_overflow(elements, (int64_t)ocp_dtype_bits(spec->dtype) / 8, &bytes))
    return 0;
  return (uint64_t)bytes;
}

void *ocp_result_copy(ocp_stream *stream, const ocp_problem_spec *spec, const ocp_result *result, const void *address) {
  const ocp_driver *driver = stream->device->driver;
  const uint64_t bytes = extent(spec, result);
  void *copy = bytes ? malloc(bytes) : NULL;
  if (copy && (driver->MemcpyDtoHAsync(copy, (CUdeviceptr)(uintptr_t)address, bytes, stream->handle) != CUDA_SUCCESS ||
               driver->StreamSynchronize(stream->handle) != CUDA_SUCCESS)) {
    free(copy);
    copy = NULL;
  }
  return copy;
}

static double element(uint32_t dtype, const void *data, int64_t index) {
  switch (dtype) {
  case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16:
    return (double)(float)((const _Float16 *)data)[index];
  case ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16: {
    const uint32_t bits = (uint32_t)((const uint16_t *)data)[index] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return (double)value;
  }
  case ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE:
    return ((const double *)data)[index];
  default:
    return (double)((const float *)data)[index];
  }
}

double ocp_result_difference(const ocp_problem_spec *spec, const ocp_result *result, const void *first,
                             const void *second) {
  double largest = 0, difference = 0;
  for (int64_t group = 0; group < result->groups; group++)
    for (int64_t row = 0; row < result->rows; row++)
      for (int64_t column = 0; column < result->columns; column++) {
        const int64_t index = group * result->group_stride + row * result->row_stride + column;
        const double a = element(spec->dtype, first, index), b = element(spec->dtype, second, index);
        if (!isfinite(a))
          continue;
        if (!isfinite(b))
          return INFINITY;
        largest = fmax(largest, fabs(a));
        difference = fmax(difference, fabs(a - b));
      }
  return difference > 0 ? difference / largest : 0;
}

double ocp_result_bound(const ocp_problem_spec *spec) {
  switch (spec->dtype) {
  case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16:
    return 8 * 0x1p-11;
  case ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16:
    return 8 * 0x1p-8;
  case ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE:
    return 1024 * 0x1p-53;
  default:
    return spec->flags & OCP_PROBLEM_TF32 ? 8 * 0x1p-11 : 1024 * 0x1p-24;
  }
}
