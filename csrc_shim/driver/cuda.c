/* The driver table over NVIDIA's driver: resolves each member from libcuda.so.1 under the versioned name that has
 * the signature in driver.h. */
#include "driver/cuda.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

static ocp_driver table;
static char reason[256];
static CUresult (*module_load_data)(CUmodule *module, const void *image);

/* Ignores image_bytes: NVIDIA's driver reads the length from the image itself. */
static CUresult load_data(CUmodule *module, const void *image, size_t image_bytes) {
  (void)image_bytes;
  return module_load_data(module, image);
}

#define MEMBER(member, symbol) {offsetof(ocp_driver, member), symbol}

static const struct {
  size_t offset;
  const char *symbol;
} members[] = {
    MEMBER(Init, "cuInit"),
    MEMBER(DriverGetVersion, "cuDriverGetVersion"),
    MEMBER(GetErrorName, "cuGetErrorName"),
    MEMBER(GetErrorString, "cuGetErrorString"),
    MEMBER(DeviceGetCount, "cuDeviceGetCount"),
    MEMBER(DeviceGet, "cuDeviceGet"),
    MEMBER(DeviceGetName, "cuDeviceGetName"),
    MEMBER(DeviceGetAttribute, "cuDeviceGetAttribute"),
    MEMBER(DeviceTotalMem, "cuDeviceTotalMem_v2"),
    MEMBER(DeviceGetPCIBusId, "cuDeviceGetPCIBusId"),
    MEMBER(DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain"),
    MEMBER(DevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2"),
    MEMBER(CtxSetCurrent, "cuCtxSetCurrent"),
    MEMBER(CtxGetCurrent, "cuCtxGetCurrent"),
    MEMBER(CtxSynchronize, "cuCtxSynchronize"),
    MEMBER(CtxEnablePeerAccess, "cuCtxEnablePeerAccess"),
    MEMBER(DeviceCanAccessPeer, "cuDeviceCanAccessPeer"),
    MEMBER(MemGetInfo, "cuMemGetInfo_v2"),
    MEMBER(MemAlloc, "cuMemAlloc_v2"),
    MEMBER(MemFree, "cuMemFree_v2"),
    MEMBER(MemHostAlloc, "cuMemHostAlloc"),
    MEMBER(MemFreeHost, "cuMemFreeHost"),
    MEMBER(MemPoolCreate, "cuMemPoolCreate"),
    MEMBER(MemPoolDestroy, "cuMemPoolDestroy"),
    MEMBER(MemPoolSetAttribute, "cuMemPoolSetAttribute"),
    MEMBER(MemPoolGetAttribute, "cuMemPoolGetAttribute"),
    MEMBER(MemPoolTrimTo, "cuMemPoolTrimTo"),
    MEMBER(MemAllocFromPoolAsync, "cuMemAllocFromPoolAsync"),
    MEMBER(MemFreeAsync, "cuMemFreeAsync"),
    MEMBER(MemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2"),
    MEMBER(MemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2"),
    MEMBER(MemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2"),
    MEMBER(MemcpyPeerAsync, "cuMemcpyPeerAsync"),
    MEMBER(MemsetD8Async, "cuMemsetD8Async"),
    MEMBER(PointerGetAttribute, "cuPointerGetAttribute"),
    MEMBER(StreamCreate, "cuStreamCreate"),
    MEMBER(StreamDestroy, "cuStreamDestroy_v2"),
    MEMBER(StreamSynchronize, "cuStreamSynchronize"),
    MEMBER(StreamQuery, "cuStreamQuery"),
    MEMBER(StreamGetCtx, "cuStreamGetCtx"),
    MEMBER(StreamWaitEvent, "cuStreamWaitEvent"),
    MEMBER(EventCreate, "cuEventCreate"),
    MEMBER(EventDestroy, "cuEventDestroy_v2"),
    MEMBER(EventRecord, "cuEventRecord"),
    MEMBER(EventSynchronize, "cuEventSynchronize"),
    MEMBER(EventQuery, "cuEventQuery"),
    MEMBER(EventElapsedTime, "cuEventElapsedTime"),
    MEMBER(ModuleUnload, "cuModuleUnload"),
    MEMBER(ModuleGetFunction, "cuModuleGetFunction"),
    MEMBER(FuncSetAttribute, "cuFuncSetAttribute"),
    MEMBER(LaunchKernel, "cuLaunchKernel"),
    MEMBER(StreamBeginCapture, "cuStreamBeginCapture_v2"),
    MEMBER(StreamEndCapture, "cuStreamEndCapture"),
    MEMBER(StreamIsCapturing, "cuStreamIsCapturing"),
    MEMBER(ThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode"),
    MEMBER(GraphCreate, "cuGraphCreate"),
    MEMBER(GraphAddKernelNode, "cuGraphAddKernelNode_v2"),
    MEMBER(GraphAddMemcpyNode, "cuGraphAddMemcpyNode"),
    MEMBER(GraphAddMemsetNode, "cuGraphAddMemsetNode"),
    MEMBER(GraphAddChildGraphNode, "cuGraphAddChildGraphNode"),
    MEMBER(GraphConditionalHandleCreate, "cuGraphConditionalHandleCreate"),
    MEMBER(GraphAddNode, "cuGraphAddNode_v2"),
    MEMBER(GraphGetNodes, "cuGraphGetNodes"),
    MEMBER(GraphNodeGetType, "cuGraphNodeGetType"),
    MEMBER(GraphInstantiate, "cuGraphInstantiateWithFlags"),
    MEMBER(GraphExecKernelNodeSetParams, "cuGraphExecKernelNodeSetParams_v2"),
    MEMBER(GraphExecMemcpyNodeSetParams, "cuGraphExecMemcpyNodeSetParams"),
    MEMBER(GraphExecMemsetNodeSetParams, "cuGraphExecMemsetNodeSetParams"),
    MEMBER(GraphExecChildGraphNodeSetParams, "cuGraphExecChildGraphNodeSetParams"),
    MEMBER(GraphLaunch, "cuGraphLaunch"),
    MEMBER(GraphExecDestroy, "cuGraphExecDestroy"),
    MEMBER(GraphDestroy, "cuGraphDestroy"),
    MEMBER(ImportExternalMemory, "cuImportExternalMemory"),
    MEMBER(ExternalMemoryGetMappedBuffer, "cuExternalMemoryGetMappedBuffer"),
    MEMBER(DestroyExternalMemory, "cuDestroyExternalMemory"),
    MEMBER(ImportExternalSemaphore, "cuImportExternalSemaphore"),
    MEMBER(SignalExternalSemaphoresAsync, "cuSignalExternalSemaphoresAsync"),
    MEMBER(WaitExternalSemaphoresAsync, "cuWaitExternalSemaphoresAsync"),
    MEMBER(DestroyExternalSemaphore, "cuDestroyExternalSemaphore"),
    MEMBER(DeviceGetUuid, "cuDeviceGetUuid_v2"),
    MEMBER(MemGetAddressRange, "cuMemGetAddressRange_v2"),
    MEMBER(IpcGetMemHandle, "cuIpcGetMemHandle"),
    MEMBER(IpcOpenMemHandle, "cuIpcOpenMemHandle_v2"),
    MEMBER(IpcCloseMemHandle, "cuIpcCloseMemHandle"),
    MEMBER(IpcGetEventHandle, "cuIpcGetEventHandle"),
    MEMBER(IpcOpenEventHandle, "cuIpcOpenEventHandle"),
};

static void resolve(void) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL); /* never closed: the driver has threads of its own */
  if (!library) {
    snprintf(reason, sizeof reason, "libcuda.so.1 cannot be loaded: %s", dlerror());
    return;
  }
  void *symbol = dlsym(library, "cuModuleLoadData");
  const char *missing = symbol ? NULL : "cuModuleLoadData";
  memcpy(&module_load_data, &symbol, sizeof symbol);
  table.ModuleLoadData = load_data;
  for (size_t i = 0; i < sizeof members / sizeof *members && !missing; i++) {
    symbol = dlsym(library, members[i].symbol);
    memcpy((char *)&table + members[i].offset, &symbol, sizeof symbol);
    if (!symbol)
      missing = members[i].symbol;
  }
  if (missing)
    snprintf(reason, sizeof reason, "libcuda.so.1 has no %s: the driver is too old (CUDA 13 is needed, R580 or newer)",
             missing);
}

const ocp_driver *ocp_driver_cuda(const char **why) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, resolve);
  if (reason[0]) {
    if (why)
      *why = reason;
    return NULL;
  }
  return &table;
}

_Static_assert(offsetof(ocp_driver, LastErrorText) == (sizeof members / sizeof *members + 1) * sizeof(void *),
               "every member of CUDA's has a symbol; ModuleLoadData is the one that is wrapped");
