#include "ort/external/ipc_memory.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "device/release.h"
#include "device/retired.h"
#include "device/wait.h"
#include "driver/driver.h"

#define WHAT "CUDA IPC memory"

struct ocp_ipc_memory {
  ocp_device *device;
  CUdeviceptr base;  /* of the allocation */
  atomic_uint users; /* tensors, and Python's use */
  ocp_retired retired;
};

static void close_handle(const ocp_ipc_memory *memory) {
  ocp_device *device = memory->device;
  ocp_device_released(device, device->driver->IpcCloseMemHandle(memory->base), "cuIpcCloseMemHandle");
}

static void release_retired(ocp_retired *retired) {
  ocp_ipc_memory *memory = (ocp_ipc_memory *)(void *)((char *)retired - offsetof(ocp_ipc_memory, retired));
  close_handle(memory);
  free(memory);
}

void ocp_ipc_memory_release(ocp_ipc_memory *memory) {
  if (atomic_fetch_sub(&memory->users, 1) == 1)
    ocp_retire(memory->device, &memory->retired, release_retired);
}

/* Checks the range against the size of the allocation. */
static int check_range(const ocp_ipc_memory *memory, uint64_t offset, uint64_t bytes, ocp_error *error) {
  CUdeviceptr base = 0;
  size_t size = 0;
  const CUresult result = memory->device->driver->MemGetAddressRange(&base, &size, memory->base);
  if (result != CUDA_SUCCESS)
    return ocp_device_fail(memory->device, result, "cuMemGetAddressRange", error);
  const uint64_t available = size - (memory->base - base);
  if (offset <= available && bytes <= available - offset)
    return ORT_OK;
  return ocp_fail(error, ORT_INVALID_ARGUMENT,
                  WHAT ": %" PRIu64 " bytes at offset %" PRIu64 " do not fit into the allocation of %" PRIu64
                       " bytes. The handle is damaged: get a new one from the exporting process",
                  bytes, offset, available);
}

int ocp_ipc_memory_open(ocp_device *device, const char *handle, uint64_t offset, uint64_t bytes, uint64_t *address,
                        ocp_ipc_memory **out, ocp_error *error) {
  CUipcMemHandle bytes_of_handle;
  memcpy(&bytes_of_handle, handle, sizeof bytes_of_handle);
  ocp_release_retired(device);
  OCP_STAY stay = ocp_device_enter(device, error);
  if (!stay.entered)
    return error->code;
  ocp_ipc_memory *made = calloc(1, sizeof *made);
  if (!made)
    return ocp_fail_memory(error);
  made->device = device;
  atomic_init(&made->users, 1);
  const CUresult result =
      device->driver->IpcOpenMemHandle(&made->base, bytes_of_handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
  if (result != CUDA_SUCCESS) {
    free(made);
    return ocp_device_fail(device, result, "cuIpcOpenMemHandle", error);
  }
  if (check_range(made, offset, bytes, error) != ORT_OK) {
    close_handle(made);
    free(made);
    return error->code;
  }
  *address = made->base + offset;
  *out = made;
  return ORT_OK;
}

int ocp_ipc_memory_close(ocp_ipc_memory *memory, ocp_error *error) {
  unsigned users = 1;
  if (ocp_device_synchronize(memory->device, error) != ORT_OK && !atomic_load(&memory->device->lost))
    return error->code;
  if (!atomic_compare_exchange_strong(&memory->users, &users, 0))
    return ocp_fail(error, ORT_INVALID_ARGUMENT,
                    WHAT ": %u tensor%s still in use. Delete each OrtValue, array and binding of the memory first",
                    users - 1, users == 2 ? " is" : "s are");
  error->code = ORT_OK; /* drops the error of a lost device, whose memory is closed all the same */
  OCP_STAY release = ocp_device_enter_to_release(memory->device);
  if (release.entered)
    close_handle(memory);
  free(memory);
  return ORT_OK;
}

/* ---- DLPack: https://dmlc.github.io/dlpack/latest/c_api.html, version 0 ---- */

typedef struct dl_tensor {
  void *data;
  struct {
    int32_t type, id;
  } device;
  int32_t ndim;
  struct {
    uint8_t code, bits;
    uint16_t lanes;
  } dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} dl_tensor;

typedef struct dl_managed_tensor {
  dl_tensor tensor;
  void *context;
  void (*deleter)(struct dl_managed_tensor *self);
} dl_managed_tensor;

enum { DL_CUDA = 2 };

static void delete_tensor(dl_managed_tensor *self) {
  ocp_ipc_memory_release(self->context);
  free(self);
}

void ocp_ipc_tensor_delete(void *tensor) { delete_tensor(tensor); }

void *ocp_ipc_memory_tensor(ocp_ipc_memory *memory, const ocp_dlpack_spec *spec, ocp_error *error) {
  const size_t shape_bytes = (size_t)spec->rank * sizeof *spec->shape;
  dl_managed_tensor *made = calloc(1, sizeof *made + shape_bytes);
  if (!made) {
    ocp_fail_memory(error);
    return NULL;
  }
  made->tensor = (dl_tensor){.data = (void *)(uintptr_t)spec->address,
                             .device = {DL_CUDA, memory->device->ordinal},
                             .ndim = spec->rank,
                             .dtype = {spec->code, spec->bits, 1},
                             .shape = (int64_t *)(void *)(made + 1)};
  if (shape_bytes)
    memcpy(made->tensor.shape, spec->shape, shape_bytes);
  made->context = memory;
  made->deleter = delete_tensor;
  atomic_fetch_add(&memory->users, 1);
  return made;
}
