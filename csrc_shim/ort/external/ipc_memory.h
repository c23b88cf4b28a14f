/* Memory of another process, opened by a handle of CUDA IPC, and DLPack tensors in it. ONNX Runtime's interop API has
 * no type for these handles, so applications use them through the Python package ort_cuda_plugin.ipc; a consumer of
 * DLPack, such as OrtValue.from_dlpack in Python, makes the tensors.
 *
 *   opened by Python, used by n tensors --close: only without tensors, waits for the streams--> closed
 *                     `--release: Python no longer needs it; the last tensor ends--> retired --> closed */
#ifndef OCP_ORT_EXTERNAL_IPC_MEMORY_H
#define OCP_ORT_EXTERNAL_IPC_MEMORY_H

#include <stdint.h>

#include "base/error.h"
#include "device/device.h"
#include "python/tables.h"

/* Opens the handle, of CU_IPC_HANDLE_SIZE bytes, and checks that the allocation has the range of `bytes` bytes at
 * `offset`. *address: the start of the range. */
int ocp_ipc_memory_open(ocp_device *device, const char *handle, uint64_t offset, uint64_t bytes, uint64_t *address,
                        ocp_ipc_memory **out, ocp_error *error);
/* Returns a DLManagedTensor, which keeps the memory open until its deleter is called; NULL with the error if out of
 * host memory. */
void *ocp_ipc_memory_tensor(ocp_ipc_memory *memory, const ocp_dlpack_spec *spec, ocp_error *error);
/* Calls the deleter of a tensor that no consumer has taken. */
void ocp_ipc_tensor_delete(void *tensor);
/* Waits for the device's streams (device/wait.h), and closes the memory. Fails if tensors still use it, or if the wait
 * fails on a device that is not lost; the memory then stays open. */
int ocp_ipc_memory_close(ocp_ipc_memory *memory, ocp_error *error);
/* Closes the memory without waiting, once no tensor and no work that was enqueued before uses it. */
void ocp_ipc_memory_release(ocp_ipc_memory *memory);

#endif
