/* Reads tensor elements to the host: inputs that decide shapes, and read-backs of a segment. */
#ifndef OCP_RUN_INSTANCE_HOST_VALUES_H
#define OCP_RUN_INSTANCE_HOST_VALUES_H

#include "base/error.h"
#include "device/stream.h"
#include "driver/driver.h"

typedef struct ocp_host_read {
  const void *host;   /* address in host memory; NULL: the elements are on the device */
  CUdeviceptr device; /* address on the device, if host is NULL */
  uint32_t dtype;     /* an integer type or bool */
  uint32_t count;
  int64_t *values; /* receives the elements */
} ocp_host_read;

/* Does all reads. Synchronizes the stream once if any of them is from the device. */
int ocp_host_values_read(ocp_stream *stream, const ocp_host_read *reads, uint32_t count, ocp_error *error);

#endif
