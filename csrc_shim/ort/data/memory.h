/* Copies: OrtDataTransferImpl, and the copies of the Memcpy kernels. The OrtMemoryDevice that ORT passes names the
 * device of a copy, so one object serves every device of a factory. */
#ifndef OCP_ORT_DATA_MEMORY_H
#define OCP_ORT_DATA_MEMORY_H

#include "base/error.h"
#include "device/device.h"
#include "device/stream.h"

/* The slot CreateDataTransfer of OrtEpFactory. */
OrtStatus *ocp_ort_create_data_transfer(OrtEpFactory *factory, OrtDataTransferImpl **out);

/* Returns the device that copies between two tensors: a device of the plugin that owns one of them. NULL with the
 * error. */
ocp_device *ocp_ort_copying_device(const OrtValue *src, const OrtValue *dst, ocp_error *error);
/* Copies a tensor into one of the same size. Both may be in host, pinned or device memory; two device tensors may be on
 * different devices, if both devices are GPUs or both are emulated. Asynchronous if `stream` belongs to the copying
 * device, with CUDA's semantics for pageable host memory. Otherwise waits for all work whose results the calling thread
 * can have, and returns when the copy is done. */
int ocp_ort_copy_tensor(const OrtValue *src, OrtValue *dst, ocp_stream *stream, ocp_error *error);
/* Enqueues a copy of a tensor to `dst`, memory of the stream's device. `room`: capacity of `dst` in bytes; *bytes:
 * bytes copied. */
int ocp_ort_copy_to_device(ocp_stream *stream, void *dst, size_t room, const OrtValue *src, size_t *bytes,
                           ocp_error *error);

#endif
