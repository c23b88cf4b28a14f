#include "run/instance/host_values.h"

#include <stdlib.h>
#include <string.h>

#include "base/counters.h"
#include "base/dtype.h"
#include "device/device.h"

/* Converts one element to int64; false if it is a uint64 above INT64_MAX, or not an integer. */
static bool convert(const char *from, uint32_t dtype, int64_t *value) {
  union {
    int8_t i8;
    uint8_t u8;
    int16_t i16;
    uint16_t u16;
    int32_t i32;
    uint32_t u32;
    int64_t i64;
  } element;
  memcpy(&element, from, ocp_dtype_bits(dtype) / 8);
  switch (dtype) {
  case ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL:
    *value = element.u8 != 0;
    return true;
  case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8:
    *value = element.i8;
    return true;
  case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8:
    *value = element.u8;
    return true;
  case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16:
    *value = element.i16;
    return true;
  case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16:
    *value = element.u16;
    return true;
  case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32:
    *value = element.i32;
    return true;
  case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT32:
    *value = element.u32;
    return true;
  case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64:
    *value = element.i64;
    return true;
  case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT64:
    *value = element.i64;
    return element.i64 >= 0;
  default:
    return false;
  }
}

static size_t bytes_of(const ocp_host_read *read) { return (size_t)read->count * (ocp_dtype_bits(read->dtype) / 8); }

/* Copies the values that are on the device into `raw`, one after the other, and waits for the copies. */
static int download(ocp_stream *stream, const ocp_host_read *reads, uint32_t count, char *raw, ocp_error *error) {
  ocp_device *device = stream->device;
  CUresult result = CUDA_SUCCESS;
  for (uint32_t i = 0; i < count && result == CUDA_SUCCESS; i++) {
    if (reads[i].host || reads[i].count == 0)
      continue;
    result = device->driver->MemcpyDtoHAsync(raw, reads[i].device, bytes_of(&reads[i]), stream->handle);
    raw += bytes_of(&reads[i]);
    ocp_count(OCP_HOST_VALUE_READS, 1);
  }
  /* Waits even after an error: copies that were enqueued still write to `raw`. */
  ocp_error wait_error;
  const int wait = ocp_stream_synchronize(stream, &wait_error);
  if (result != CUDA_SUCCESS)
    return ocp_device_fail(device, result, "reading values back that decide a shape: cuMemcpyDtoHAsync", error);
  if (wait != ORT_OK)
    *error = wait_error;
  return wait;
}

int ocp_host_values_read(ocp_stream *stream, const ocp_host_read *reads, uint32_t count, ocp_error *error) {
  size_t bytes = 0;
  for (uint32_t i = 0; i < count; i++)
    bytes += reads[i].host ? 0 : bytes_of(&reads[i]);
  char few[512], *raw = bytes <= sizeof few ? few : malloc(bytes);
  if (!raw)
    return ocp_fail_memory(error);
  int code = bytes ? download(stream, reads, count, raw, error) : ORT_OK;
  const char *next = raw;
  for (uint32_t i = 0; i < count && code == ORT_OK; i++) {
    const char *from = reads[i].host ? reads[i].host : next;
    for (uint32_t k = 0; k < reads[i].count && code == ORT_OK; k++)
      if (!convert(from + k * (size_t)(ocp_dtype_bits(reads[i].dtype) / 8), reads[i].dtype, &reads[i].values[k]))
        code = ocp_fail(error, ORT_INVALID_ARGUMENT, "a value that decides a shape is 2^63 or more, expected an int64");
    if (!reads[i].host)
      next += bytes_of(&reads[i]);
  }
  if (raw != few)
    free(raw);
  return code;
}
