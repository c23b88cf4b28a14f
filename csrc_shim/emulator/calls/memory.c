/* Memory of the emulated driver: allocation, copies and memsets (cuMemAlloc, cuMemcpyAsync, cuMemsetD8Async, ...). */
#include "emulator/calls/memory.h"

#include "driver/activity.h"
#include "emulator/external/ipc_memory.h"
#include "emulator/external/mapping.h"
#include "emulator/heap.h"
#include "emulator/op.h"
#include "emulator/shadow.h"
#include "emulator/state.h"
#include "emulator/work/capture.h"
#include "emulator/work/enqueue.h"
#include "emulator/work/execute.h"
#include "emulator/work/stream_list.h"

CUresult emu_mem_get_info(size_t *free_bytes, size_t *total_bytes) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (result)
    return result;
  pthread_mutex_lock(&device->heap.lock);
  *total_bytes = device->heap.capacity;
  *free_bytes = device->heap.capacity - device->heap.used;
  pthread_mutex_unlock(&device->heap.lock);
  *free_bytes += emu_shadow_quarantined(device);
  return CUDA_SUCCESS;
}

CUresult emu_mem_alloc(CUdeviceptr *address, size_t bytes) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (result || (result = emu_capture_unsafe()))
    return result;
  if (!address || bytes == 0)
    return CUDA_ERROR_INVALID_VALUE;
  *address = emu_heap_alloc(&device->heap, bytes);
  if (!*address && emu_shadow_flush(device))
    *address = emu_heap_alloc(&device->heap, bytes);
  if (!*address)
    return emu_fail(CUDA_ERROR_OUT_OF_MEMORY, "no room for %zu bytes on emulated device %d", bytes, device->ordinal);
  emu_shadow_allocated(*address, bytes);
  atomic_fetch_add(&emu.live, 1);
  return CUDA_SUCCESS;
}

static bool free_block(emu_device *device, uint64_t address) {
  uint64_t start, size;
  if (!emu.config.check)
    return emu_heap_free(&device->heap, address);
  return emu_heap_find(&device->heap, address, 0, &start, &size) && start == address &&
         emu_shadow_free(device, address, size);
}

/* Frees at once. CUDA's cuMemFree waits for the device; this function does not. So if a program has not waited for
 * work, the work accesses freed memory, and the checking mode reports that. */
CUresult emu_mem_free(CUdeviceptr address) {
  CUresult result = emu_leave();
  if (result || (result = emu_capture_unsafe()))
    return result;
  if (!address)
    return CUDA_SUCCESS;
  if (emu_mapping_end(address, EMU_MAPPING_BUFFER)) {
    atomic_fetch_sub(&emu.live, 1);
    return emu_lost();
  }
  if ((result = emu_ipc_memory_end_export(address)))
    return result;
  CUdeviceptr start;
  uint64_t bytes;
  if (!emu_is_device_address(address) || emu_mapping_find(address, &start, &bytes) ||
      !free_block(emu_device_of(address), address))
    return emu_fail(CUDA_ERROR_INVALID_VALUE, "no allocation starts at 0x%llx", (unsigned long long)address);
  atomic_fetch_sub(&emu.live, 1);
  return emu_lost();
}

CUresult emu_mem_host_alloc(void **address, size_t bytes, unsigned flags) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (result || (result = emu_capture_unsafe()))
    return result;
  if (!address || bytes == 0 || flags > 7)
    return CUDA_ERROR_INVALID_VALUE;
  *address = (void *)emu_heap_alloc(&emu.pinned, bytes);
  if (!*address)
    return emu_fail(CUDA_ERROR_OUT_OF_MEMORY, "no room for %zu bytes of page-locked memory", bytes);
  atomic_fetch_add(&emu.live, 1);
  return CUDA_SUCCESS;
}

CUresult emu_mem_free_host(void *address) {
  CUresult result = emu_leave();
  if (result || (result = emu_capture_unsafe()))
    return result;
  if (!emu_heap_free(&emu.pinned, (uint64_t)address))
    return emu_fail(CUDA_ERROR_INVALID_VALUE, "%p is not a page-locked allocation", address);
  atomic_fetch_sub(&emu.live, 1);
  return emu_lost();
}

static CUresult check_range(const char *what, uint64_t address, uint64_t bytes) {
  if (emu_device_range(address, bytes))
    return CUDA_SUCCESS;
  return emu_fail(CUDA_ERROR_INVALID_VALUE, "%s: 0x%llx with %llu bytes is not inside one device allocation", what,
                  (unsigned long long)address, (unsigned long long)bytes);
}

CUresult emu_mem_get_address_range(CUdeviceptr *base, size_t *bytes, CUdeviceptr address) {
  emu_device *device;
  uint64_t start = 0, size = 0;
  const CUresult result = emu_enter(&device);
  if (result)
    return result;
  if (!emu_mapping_find(address, &start, &size) &&
      (!emu_is_device_address(address) || !emu_heap_find(&emu_device_of(address)->heap, address, 1, &start, &size)))
    return emu_fail(CUDA_ERROR_NOT_FOUND, "0x%llx is not in device memory", (unsigned long long)address);
  if (base)
    *base = start;
  if (bytes)
    *bytes = size;
  return CUDA_SUCCESS;
}

CUresult emu_pointer_get_attribute(void *data, int attribute, CUdeviceptr pointer) {
  if (!data || attribute != CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
    return CUDA_ERROR_INVALID_VALUE;
  if (!emu_is_device_address(pointer) || !emu_heap_find(&emu_device_of(pointer)->heap, pointer, 0, NULL, NULL))
    return emu_fail(CUDA_ERROR_INVALID_VALUE, "0x%llx is not in device memory", (unsigned long long)pointer);
  *(int *)data = (int)(emu_device_of(pointer) - emu.devices);
  return CUDA_SUCCESS;
}

CUresult emu_memcpy_h2d(CUdeviceptr dst, const void *src, size_t bytes, CUstream stream) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (result || bytes == 0 || (result = check_range("copy to the device", dst, bytes)))
    return result;
  if (!src || emu_is_device_address((uint64_t)src))
    return emu_fail(CUDA_ERROR_INVALID_VALUE, "copy to the device: the source is not host memory");
  emu_op op = {.kind = EMU_OP_COPY, .source = ocp_activity_source(), .copy = {dst, (uint64_t)src, bytes, false, true}};
  return emu_enqueue(emu_stream_of(device, stream), &op);
}

CUresult emu_memcpy_d2h(void *dst, CUdeviceptr src, size_t bytes, CUstream stream) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (result || bytes == 0 || (result = check_range("copy to the host", src, bytes)))
    return result;
  if (!dst || emu_is_device_address((uint64_t)dst))
    return emu_fail(CUDA_ERROR_INVALID_VALUE, "copy to the host: the destination is not host memory");
  emu_op op = {.kind = EMU_OP_COPY, .source = ocp_activity_source(), .copy = {(uint64_t)dst, src, bytes, true, false}};
  return emu_enqueue(emu_stream_of(device, stream), &op);
}

CUresult emu_memcpy_d2d(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (result || bytes == 0 || (result = check_range("copy within the device", dst, bytes)) ||
      (result = check_range("copy within the device", src, bytes)))
    return result;
  emu_op op = {.kind = EMU_OP_COPY, .source = ocp_activity_source(), .copy = {dst, src, bytes, false, false}};
  return emu_enqueue(emu_stream_of(device, stream), &op);
}

static bool is_in(CUcontext context, uint64_t address) { return context && emu_device_of(address) == context; }

CUresult emu_memcpy_peer(CUdeviceptr dst, CUcontext dst_context, CUdeviceptr src, CUcontext src_context, size_t bytes,
                         CUstream stream) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (result || bytes == 0 || (result = check_range("copy between devices", dst, bytes)) ||
      (result = check_range("copy between devices", src, bytes)))
    return result;
  if (!is_in(dst_context, dst) || !is_in(src_context, src))
    return emu_fail(CUDA_ERROR_INVALID_VALUE,
                    "copy between devices: an address is not in the memory of its context's device");
  emu_op op = {.kind = EMU_OP_COPY, .source = ocp_activity_source(), .copy = {dst, src, bytes, false, false}};
  return emu_enqueue(emu_stream_of(device, stream), &op);
}

CUresult emu_memset_d8(CUdeviceptr dst, unsigned char value, size_t count, CUstream stream) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (result || count == 0 || (result = check_range("fill", dst, count)))
    return result;
  emu_op op = {.kind = EMU_OP_SET, .source = ocp_activity_source(), .set = {dst, count, value}};
  return emu_enqueue(emu_stream_of(device, stream), &op);
}

size_t emu_redzone(void) { return emu.config.check ? EMU_GRANULE : 0; }

bool emu_reuse(CUdeviceptr address, size_t bytes, size_t held, CUstream stream) {
  if (!emu.config.check || bytes > held || !emu_device_range(address, held))
    return false;
  emu_op op = {.kind = EMU_OP_REUSE, .reuse = {address, bytes, held}};
  CUresult result = CUDA_SUCCESS;
  if (!stream) {
    emu_shadow_reused(address, bytes, held);
    return false;
  }
  stream = emu_stream_of(emu_device_of(address), stream);
  if (emu_is_capturing(stream, &result) || result) /* a graph contains no allocations */
    return false;
  return emu_enqueue(stream, &op) == CUDA_SUCCESS; /* a failure: lost device, or no host memory */
}
