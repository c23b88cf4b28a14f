/* Copies: OrtDataTransferImpl, and the copies of the Memcpy kernels. The OrtMemoryDevice that ORT passes names the
 * device of a copy, so one object serves every device of a factory. */
#ifndef OCP_ORT_DATA_MEMORY_H
#define OCP_ORT_DATA_MEMORY_H

#include "base/error.h"
#include "device/device.h"
#include "device/stream.h"

/* The slot CreateDataTransfer of OrtEpFactory. */
OrtStatus *ocp_ort_create_data_transfer(OrtEpFactory *factory, OrtDataTransferImpl **out);

/* Returns the device that copies between two tensors: a device of ours that has one of them. NULL with the error. */
ocp_device *ocp_ort_copying_device(const OrtValue *src, const OrtValue *dst, ocp_error *error);
/* Copies a tensor into one of the same size, between any two of host, pinned and device memory of the device (or of
 * two devices of one kind). Asynchronous if a stream of the copying device is given, with CUDA's semantics for
 * pageable host memory. Otherwise waits for all work whose results the calling thread can have, and returns when the
 * copy is done. */
int ocp_ort_copy_tensor(const OrtValue *src, OrtValue *dst, ocp_stream *stream, ocp_error *error);
/* Enqueues a copy of a tensor to memory of the stream's device; `room`: its capacity in bytes. */
int ocp_ort_copy_to_device(ocp_stream *stream, void *dst, size_t room, const OrtValue *src, size_t *bytes,
                           ocp_error *error);

#endif
