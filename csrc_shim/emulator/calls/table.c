/* The emulator's driver table, and the calls that describe its devices. */
#include "emulator/calls/table.h"

#include <stdio.h>
#include <string.h>

#include "emulator/calls/async_alloc.h"
#include "emulator/calls/emulator.h"
#include "emulator/calls/event.h"
#include "emulator/calls/graph_exec.h"
#include "emulator/calls/image.h"
#include "emulator/calls/launch.h"
#include "emulator/calls/loader.h"
#include "emulator/calls/memory.h"
#include "emulator/calls/stream.h"
#include "emulator/external/external_memory.h"
#include "emulator/external/external_semaphore.h"
#include "emulator/external/ipc_event.h"
#include "emulator/external/ipc_memory.h"
#include "emulator/fault.h"
#include "emulator/mempool.h"
#include "emulator/state.h"
#include "emulator/work/capture.h"
#include "emulator/work/graph.h"

static CUresult init(unsigned flags) { return flags ? CUDA_ERROR_INVALID_VALUE : emu_start(); }

static CUresult driver_get_version(int *version) {
  if (!version)
    return CUDA_ERROR_INVALID_VALUE;
  const int old = emu_faults_set()->driver_version;
  *version = old ? old : 13000;
  return CUDA_SUCCESS;
}

static const struct {
  CUresult code;
  const char *name, *text;
} errors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_DEINITIALIZED, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {CUDA_ERROR_DEVICE_UNAVAILABLE, "CUDA_ERROR_DEVICE_UNAVAILABLE",
     "CUDA-capable device(s) is/are busy or unavailable"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {CUDA_ERROR_INVALID_PTX, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU",
     "no kernel image is available for execution on the device"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {EMU_ERROR_ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
     "too many resources requested for launch"},
    {CUDA_ERROR_LAUNCH_TIMEOUT, "CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"},
    {CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED",
     "peer access is already enabled"},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {EMU_ERROR_CAPTURE_MERGE, "CUDA_ERROR_STREAM_CAPTURE_MERGE",
     "operation would result in a merge of separate capture sequences"},
    {CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
     "capture was not ended in the same stream as it began"},
    {EMU_ERROR_CAPTURE_UNJOINED, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work"},
    {CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
     "dependency created on uncaptured work in another stream"},
    {CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {EMU_ERROR_CAPTURED_EVENT, "CUDA_ERROR_CAPTURED_EVENT",
     "operation not permitted on an event last recorded in a capturing stream"},
    {EMU_ERROR_CAPTURE_WRONG_THREAD, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
     "attempt to terminate a thread-local capture sequence from another thread"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static CUresult get_error_name(CUresult error, const char **name) {
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].code == error) {
      *name = errors[i].name;
      return CUDA_SUCCESS;
    }
  *name = NULL;
  return CUDA_ERROR_INVALID_VALUE;
}

static CUresult get_error_string(CUresult error, const char **text) {
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].code == error) {
      *text = errors[i].text;
      return CUDA_SUCCESS;
    }
  *text = NULL;
  return CUDA_ERROR_INVALID_VALUE;
}

static CUresult device_get_count(int *count) {
  CUresult result = emu_start();
  if (result)
    return result;
  *count = (int)emu.config.num_devices;
  return CUDA_SUCCESS;
}

static CUresult check_device(CUdevice device) {
  CUresult result = emu_start();
  if (result)
    return result;
  return device < 0 || device >= (int)emu.config.num_devices ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

static CUresult device_get(CUdevice *device, int ordinal) {
  CUresult result = check_device(ordinal);
  if (!result)
    *device = ordinal;
  return result;
}

static CUresult device_get_name(char *name, int length, CUdevice device) {
  CUresult result = check_device(device);
  if (!result)
    snprintf(name, (size_t)length, "%s", emu_faults_set()->name[0] ? emu_faults_set()->name : "Emulated CUDA device");
  return result;
}

static CUresult device_get_attribute(int *value, int attribute, CUdevice device) {
  CUresult result = check_device(device);
  if (result)
    return result;
  const emu_faults *faults = emu_faults_set();
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    *value = (int)EMU_MAX_THREADS;
    return CUDA_SUCCESS;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
    *value = (int)EMU_WARP;
    return CUDA_SUCCESS;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
    *value = faults->multiprocessors ? faults->multiprocessors : (int)emu.threads;
    return CUDA_SUCCESS;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
    *value = faults->cc_major ? faults->cc_major : 9;
    return CUDA_SUCCESS;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
    *value = faults->cc_minor;
    return CUDA_SUCCESS;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
    *value = (int)EMU_MAX_SHARED;
    return CUDA_SUCCESS;
  case CU_DEVICE_ATTRIBUTE_TIMELINE_SEMAPHORE_INTEROP_SUPPORTED:
    *value = 1;
    return CUDA_SUCCESS;
  default:
    return emu_fail(CUDA_ERROR_INVALID_VALUE, "device attribute %d is not emulated", attribute);
  }
}

static CUresult device_total_mem(size_t *bytes, CUdevice device) {
  CUresult result = check_device(device);
  if (!result)
    *bytes = emu.config.device_bytes;
  return result;
}

/* Returns a bus address that no real device has: domain ffff. */
static CUresult device_get_pci_bus_id(char *bus_id, int length, CUdevice device) {
  CUresult result = check_device(device);
  if (!result && snprintf(bus_id, (size_t)length, "ffff:%02x:00.0", device) >= length)
    result = CUDA_ERROR_INVALID_VALUE;
  return result;
}

/* Returns the same UUID in every process, so that processes find an emulated device of the same ordinal. */
static CUresult device_get_uuid(CUuuid *uuid, CUdevice device) {
  CUresult result = check_device(device);
  if (result || !uuid)
    return result ? result : CUDA_ERROR_INVALID_VALUE;
  memcpy(uuid->bytes, "emulated-device", sizeof uuid->bytes);
  uuid->bytes[15] = (char)device;
  return CUDA_SUCCESS;
}

static CUresult device_can_access_peer(int *can_access, CUdevice device, CUdevice peer) {
  CUresult result = check_device(device);
  if (result || (result = check_device(peer)))
    return result;
  *can_access = device != peer;
  return CUDA_SUCCESS;
}

static CUresult ctx_enable_peer_access(CUcontext peer, unsigned flags) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (result)
    return result;
  if (flags)
    return CUDA_ERROR_INVALID_VALUE;
  if (!peer || peer == device)
    return peer ? CUDA_ERROR_INVALID_DEVICE : CUDA_ERROR_INVALID_CONTEXT;
  const unsigned bit = 1u << peer->ordinal;
  return atomic_fetch_or(&device->peers, bit) & bit ? CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED : CUDA_SUCCESS;
}

static CUresult primary_ctx_retain(CUcontext *context, CUdevice device) {
  CUresult result = check_device(device);
  if (result)
    return result;
  if (emu_faults_set()->exclusive)
    return CUDA_ERROR_DEVICE_UNAVAILABLE;
  atomic_fetch_add(&emu.devices[device].retained, 1);
  *context = &emu.devices[device];
  return CUDA_SUCCESS;
}

/* Releases the primary context. The last release resets the context and thereby clears a sticky error. */
static CUresult primary_ctx_release(CUdevice device) {
  CUresult result = check_device(device);
  if (result)
    return result;
  if (atomic_load(&emu.devices[device].retained) == 0)
    return CUDA_ERROR_INVALID_CONTEXT;
  if (atomic_fetch_sub(&emu.devices[device].retained, 1) == 1) {
    atomic_store(&emu.devices[device].peers, 0);
    emu_recover(&emu.devices[device]);
  }
  return CUDA_SUCCESS;
}

static ocp_driver table = {
    .Init = init,
    .DriverGetVersion = driver_get_version,
    .GetErrorName = get_error_name,
    .GetErrorString = get_error_string,
    .DeviceGetCount = device_get_count,
    .DeviceGet = device_get,
    .DeviceGetName = device_get_name,
    .DeviceGetAttribute = device_get_attribute,
    .DeviceTotalMem = device_total_mem,
    .DeviceGetPCIBusId = device_get_pci_bus_id,
    .DevicePrimaryCtxRetain = primary_ctx_retain,
    .DevicePrimaryCtxRelease = primary_ctx_release,
    .CtxSetCurrent = emu_ctx_set_current,
    .CtxGetCurrent = emu_ctx_get_current,
    .CtxSynchronize = emu_ctx_synchronize,
    .CtxEnablePeerAccess = ctx_enable_peer_access,
    .DeviceCanAccessPeer = device_can_access_peer,
    .MemGetInfo = emu_mem_get_info,
    .MemAlloc = emu_mem_alloc,
    .MemFree = emu_mem_free,
    .MemHostAlloc = emu_mem_host_alloc,
    .MemFreeHost = emu_mem_free_host,
    .MemPoolCreate = emu_mem_pool_create,
    .MemPoolDestroy = emu_mem_pool_destroy,
    .MemPoolSetAttribute = emu_mem_pool_set_attribute,
    .MemPoolGetAttribute = emu_mem_pool_get_attribute,
    .MemPoolTrimTo = emu_mem_pool_trim_to,
    .MemAllocFromPoolAsync = emu_mem_alloc_from_pool_async,
    .MemFreeAsync = emu_mem_free_async,
    .MemcpyHtoDAsync = emu_memcpy_h2d,
    .MemcpyDtoHAsync = emu_memcpy_d2h,
    .MemcpyDtoDAsync = emu_memcpy_d2d,
    .MemcpyPeerAsync = emu_memcpy_peer,
    .MemsetD8Async = emu_memset_d8,
    .PointerGetAttribute = emu_pointer_get_attribute,
    .StreamCreate = emu_stream_create,
    .StreamDestroy = emu_stream_destroy,
    .StreamSynchronize = emu_stream_synchronize,
    .StreamQuery = emu_stream_query,
    .StreamGetCtx = emu_stream_get_ctx,
    .StreamWaitEvent = emu_stream_wait_event,
    .EventCreate = emu_event_create,
    .EventDestroy = emu_event_destroy,
    .EventRecord = emu_event_record,
    .EventSynchronize = emu_event_synchronize,
    .EventQuery = emu_event_query,
    .EventElapsedTime = emu_event_elapsed_time,
    .ModuleLoadData = emu_module_load,
    .ModuleUnload = emu_module_unload,
    .ModuleGetFunction = emu_module_get_function,
    .FuncSetAttribute = emu_func_set_attribute,
    .LaunchKernel = emu_launch_kernel,
    .StreamBeginCapture = emu_stream_begin_capture,
    .StreamEndCapture = emu_stream_end_capture,
    .StreamIsCapturing = emu_stream_is_capturing,
    .ThreadExchangeStreamCaptureMode = emu_thread_exchange_stream_capture_mode,
    .GraphCreate = emu_graph_create,
    .GraphAddKernelNode = emu_graph_add_kernel_node,
    .GraphAddMemcpyNode = emu_graph_add_memcpy_node,
    .GraphAddMemsetNode = emu_graph_add_memset_node,
    .GraphAddChildGraphNode = emu_graph_add_child_graph_node,
    .GraphConditionalHandleCreate = emu_graph_conditional_handle_create,
    .GraphAddNode = emu_graph_add_node,
    .GraphGetNodes = emu_graph_get_nodes,
    .GraphNodeGetType = emu_graph_node_get_type,
    .GraphInstantiate = emu_graph_instantiate,
    .GraphExecKernelNodeSetParams = emu_graph_exec_kernel_node_set_params,
    .GraphExecMemcpyNodeSetParams = emu_graph_exec_memcpy_node_set_params,
    .GraphExecMemsetNodeSetParams = emu_graph_exec_memset_node_set_params,
    .GraphExecChildGraphNodeSetParams = emu_graph_exec_child_graph_node_set_params,
    .GraphLaunch = emu_graph_launch,
    .GraphExecDestroy = emu_graph_exec_destroy,
    .GraphDestroy = emu_graph_destroy,
    .ImportExternalMemory = emu_import_external_memory,
    .ExternalMemoryGetMappedBuffer = emu_external_memory_get_mapped_buffer,
    .DestroyExternalMemory = emu_destroy_external_memory,
    .ImportExternalSemaphore = emu_import_external_semaphore,
    .SignalExternalSemaphoresAsync = emu_signal_external_semaphores,
    .WaitExternalSemaphoresAsync = emu_wait_external_semaphores,
    .DestroyExternalSemaphore = emu_destroy_external_semaphore,
    .DeviceGetUuid = device_get_uuid,
    .MemGetAddressRange = emu_mem_get_address_range,
    .IpcGetMemHandle = emu_ipc_get_mem_handle,
    .IpcOpenMemHandle = emu_ipc_open_mem_handle,
    .IpcCloseMemHandle = emu_ipc_close_mem_handle,
    .IpcGetEventHandle = emu_ipc_get_event_handle,
    .IpcOpenEventHandle = emu_ipc_open_event_handle,
    .LastErrorText = emu_last_error,
    .ReuseMemory = emu_reuse,
    .RedZone = emu_redzone,
};

const ocp_driver *ocp_driver_emulator(void) {
  emu_faults_attach(&table);
  return &table;
}
