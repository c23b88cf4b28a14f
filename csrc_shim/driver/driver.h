/* The subset of the CUDA driver API that the plugin calls, as one table.
 *
 * Two implementations exist: the real driver, resolved from libcuda.so.1 (cuda.c), and the emulated device
 * (the folder emulator). Members have the names, signatures and error codes of the CUDA driver API without the "cu"
 * prefix, so that callers read as CUDA code and do not know which device they use. */
#ifndef OCP_DRIVER_DRIVER_H
#define OCP_DRIVER_DRIVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphNode_st *CUgraphNode;
typedef struct CUgraphExec_st *CUgraphExec;
typedef unsigned long long CUgraphConditionalHandle;
typedef struct CUmemPoolHandle_st *CUmemoryPool;
typedef struct CUextMemory_st *CUexternalMemory;
typedef struct CUextSemaphore_st *CUexternalSemaphore;

enum {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
  CUDA_ERROR_NOT_INITIALIZED = 3,
  CUDA_ERROR_DEINITIALIZED = 4,
  CUDA_ERROR_DEVICE_UNAVAILABLE = 46,
  CUDA_ERROR_NO_DEVICE = 100,
  CUDA_ERROR_INVALID_DEVICE = 101,
  CUDA_ERROR_INVALID_IMAGE = 200,
  CUDA_ERROR_INVALID_CONTEXT = 201,
  CUDA_ERROR_NO_BINARY_FOR_GPU = 209,
  CUDA_ERROR_INVALID_PTX = 218,
  CUDA_ERROR_INVALID_HANDLE = 400,
  CUDA_ERROR_NOT_FOUND = 500,
  CUDA_ERROR_NOT_READY = 600,
  CUDA_ERROR_ILLEGAL_ADDRESS = 700,
  CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES = 701,
  CUDA_ERROR_LAUNCH_TIMEOUT = 702,
  CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704,
  CUDA_ERROR_LAUNCH_FAILED = 719,
  CUDA_ERROR_NOT_SUPPORTED = 801,
  CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
  CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
  CUDA_ERROR_STREAM_CAPTURE_UNMATCHED = 903,
  CUDA_ERROR_STREAM_CAPTURE_ISOLATION = 905,
  CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906,
  CUDA_ERROR_UNKNOWN = 999,
};

enum { CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9 }; /* an int; the only pointer attribute that callers ask for */
/* The legacy default stream, which synchronizes with all streams except non-blocking ones. NULL is the same stream. */
#define CU_STREAM_LEGACY ((CUstream)1)
/* The per-thread default stream. */
#define CU_STREAM_PER_THREAD ((CUstream)2)
enum {
  CU_STREAM_NON_BLOCKING = 1,
  CU_EVENT_DEFAULT = 0,
  CU_EVENT_DISABLE_TIMING = 2,
  CU_EVENT_INTERPROCESS = 4,
  CU_MEMHOSTALLOC_PORTABLE = 1
};
enum { CU_STREAM_CAPTURE_MODE_GLOBAL = 0, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1, CU_STREAM_CAPTURE_MODE_RELAXED = 2 };
enum {
  CU_STREAM_CAPTURE_STATUS_NONE = 0,
  CU_STREAM_CAPTURE_STATUS_ACTIVE = 1,
  CU_STREAM_CAPTURE_STATUS_INVALIDATED = 2
};
enum { CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8 };
enum {
  CU_GRAPH_NODE_TYPE_KERNEL = 0,
  CU_GRAPH_NODE_TYPE_MEMCPY = 1,
  CU_GRAPH_NODE_TYPE_MEMSET = 2,
  CU_GRAPH_NODE_TYPE_GRAPH = 4,
  CU_GRAPH_NODE_TYPE_CONDITIONAL = 13
};
enum { CU_GRAPH_COND_TYPE_IF = 0, CU_GRAPH_COND_TYPE_WHILE = 1 };
enum { CU_GRAPH_COND_ASSIGN_DEFAULT = 1 };
enum { CU_MEMORYTYPE_HOST = 1, CU_MEMORYTYPE_DEVICE = 2 };
/* Device attributes that callers ask for; the numbers are CUDA's. */
enum {
  CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 1,
  CU_DEVICE_ATTRIBUTE_WARP_SIZE = 10,
  CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
  CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97,
  CU_DEVICE_ATTRIBUTE_TIMELINE_SEMAPHORE_INTEROP_SUPPORTED = 114,
};

/* CUDA_KERNEL_NODE_PARAMS_v2 */
typedef struct {
  CUfunction func;
  unsigned gridDimX, gridDimY, gridDimZ;
  unsigned blockDimX, blockDimY, blockDimZ;
  unsigned sharedMemBytes;
  void **kernelParams;
  void **extra;
  void *kern;
  CUcontext ctx;
} CUDA_KERNEL_NODE_PARAMS;

/* CUDA_MEMCPY3D_v2 */
typedef struct {
  size_t srcXInBytes, srcY, srcZ, srcLOD;
  int srcMemoryType;
  const void *srcHost;
  CUdeviceptr srcDevice;
  void *srcArray, *reserved0;
  size_t srcPitch, srcHeight;
  size_t dstXInBytes, dstY, dstZ, dstLOD;
  int dstMemoryType;
  void *dstHost;
  CUdeviceptr dstDevice;
  void *dstArray, *reserved1;
  size_t dstPitch, dstHeight;
  size_t WidthInBytes, Height, Depth;
} CUDA_MEMCPY3D;

/* CUDA_MEMSET_NODE_PARAMS_v1 */
typedef struct {
  CUdeviceptr dst;
  size_t pitch;
  unsigned value, elementSize;
  size_t width, height;
} CUDA_MEMSET_NODE_PARAMS;

/* CUDA_CONDITIONAL_NODE_PARAMS */
typedef struct {
  CUgraphConditionalHandle handle;
  int type;
  unsigned size;
  CUgraph *phGraph_out; /* set by the driver: the graphs of the node's bodies, `size` of them */
  CUcontext ctx;
} CUDA_CONDITIONAL_NODE_PARAMS;

typedef union {
  CUDA_CONDITIONAL_NODE_PARAMS node;
  long long reserved1[29];
} ocp_conditional_params;

/* The parameters of GraphAddNode. Callers add only conditional nodes with it. */
typedef struct {
  int type;
  int reserved0[3];
  ocp_conditional_params conditional;
  long long reserved2;
} CUgraphNodeParams;
typedef struct CUgraphEdgeData_st CUgraphEdgeData;

enum { CU_MEM_ALLOCATION_TYPE_PINNED = 1, CU_MEM_LOCATION_TYPE_DEVICE = 1 };
enum {
  CU_MEMPOOL_ATTR_RELEASE_THRESHOLD = 4,
  CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT = 5,
  CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH = 6,
  CU_MEMPOOL_ATTR_USED_MEM_CURRENT = 7,
  CU_MEMPOOL_ATTR_USED_MEM_HIGH = 8,
};

typedef struct {
  int type;
  int id;
} CUmemLocation;

typedef struct {
  int allocType;
  int handleTypes;
  CUmemLocation location;
  void *win32SecurityAttributes;
  size_t maxSize; /* bytes; 0: the driver's default */
  unsigned short usage;
  unsigned char reserved[54];
} CUmemPoolProps;

/* ---- memory and semaphores of other APIs ---- */

/* The handle types that callers use: file descriptors. The driver owns a descriptor that it has imported. */
enum { CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD = 1, CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_TIMELINE_SEMAPHORE_FD = 9 };

typedef union {
  int fd;
  void *win32[2];
} ocp_external_handle;

typedef struct {
  int type;
  ocp_external_handle handle;
  unsigned long long size; /* bytes of the whole allocation */
  unsigned flags;
  unsigned reserved[16];
} CUDA_EXTERNAL_MEMORY_HANDLE_DESC;

typedef struct {
  unsigned long long offset, size; /* bytes */
  unsigned flags;
  unsigned reserved[16];
} CUDA_EXTERNAL_MEMORY_BUFFER_DESC;

typedef struct {
  int type;
  ocp_external_handle handle;
  unsigned flags;
  unsigned reserved[16];
} CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC;

typedef union {
  unsigned long long fence; /* value of a timeline semaphore */
  unsigned words[18];
} ocp_external_params;

typedef struct {
  ocp_external_params params;
  unsigned flags;
  unsigned reserved[16];
} CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS;

typedef struct {
  ocp_external_params params;
  unsigned flags;
  unsigned reserved[16];
} CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS;

/* ---- memory and events of other processes (CUDA IPC) ---- */

enum { CU_IPC_HANDLE_SIZE = 64, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1 };

typedef struct {
  char reserved[64];
} CUipcEventHandle;

typedef struct {
  char reserved[64];
} CUipcMemHandle;

typedef struct {
  char bytes[16];
} CUuuid;

typedef struct ocp_driver {
  CUresult (*Init)(unsigned flags);
  CUresult (*DriverGetVersion)(int *version);
  CUresult (*GetErrorName)(CUresult error, const char **name);
  CUresult (*GetErrorString)(CUresult error, const char **text);
  CUresult (*DeviceGetCount)(int *count);
  CUresult (*DeviceGet)(CUdevice *device, int ordinal);
  CUresult (*DeviceGetName)(char *name, int length, CUdevice device);
  CUresult (*DeviceGetAttribute)(int *value, int attribute, CUdevice device);
  CUresult (*DeviceTotalMem)(size_t *bytes, CUdevice device);
  CUresult (*DeviceGetPCIBusId)(char *bus_id, int length, CUdevice device);
  CUresult (*DevicePrimaryCtxRetain)(CUcontext *context, CUdevice device);
  CUresult (*DevicePrimaryCtxRelease)(CUdevice device);
  CUresult (*CtxSetCurrent)(CUcontext context);
  CUresult (*CtxGetCurrent)(CUcontext *context);
  CUresult (*CtxSynchronize)(void);
  CUresult (*CtxEnablePeerAccess)(CUcontext peer, unsigned flags);
  CUresult (*DeviceCanAccessPeer)(int *can_access, CUdevice device, CUdevice peer);
  CUresult (*MemGetInfo)(size_t *free_bytes, size_t *total_bytes);
  CUresult (*MemAlloc)(CUdeviceptr *address, size_t bytes);
  CUresult (*MemFree)(CUdeviceptr address);
  CUresult (*MemHostAlloc)(void **address, size_t bytes, unsigned flags);
  CUresult (*MemFreeHost)(void *address);
  CUresult (*MemPoolCreate)(CUmemoryPool *pool, const CUmemPoolProps *props);
  CUresult (*MemPoolDestroy)(CUmemoryPool pool);
  CUresult (*MemPoolSetAttribute)(CUmemoryPool pool, int attribute, void *value);
  CUresult (*MemPoolGetAttribute)(CUmemoryPool pool, int attribute, void *value);
  CUresult (*MemPoolTrimTo)(CUmemoryPool pool, size_t keep);
  CUresult (*MemAllocFromPoolAsync)(CUdeviceptr *address, size_t bytes, CUmemoryPool pool, CUstream stream);
  CUresult (*MemFreeAsync)(CUdeviceptr address, CUstream stream);
  CUresult (*MemcpyHtoDAsync)(CUdeviceptr dst, const void *src, size_t bytes, CUstream stream);
  CUresult (*MemcpyDtoHAsync)(void *dst, CUdeviceptr src, size_t bytes, CUstream stream);
  CUresult (*MemcpyDtoDAsync)(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream);
  CUresult (*MemcpyPeerAsync)(CUdeviceptr dst, CUcontext dst_context, CUdeviceptr src, CUcontext src_context,
                              size_t bytes, CUstream stream);
  CUresult (*MemsetD8Async)(CUdeviceptr dst, unsigned char value, size_t count, CUstream stream);
  CUresult (*PointerGetAttribute)(void *data, int attribute, CUdeviceptr pointer);
  CUresult (*StreamCreate)(CUstream *stream, unsigned flags);
  CUresult (*StreamDestroy)(CUstream stream);
  CUresult (*StreamSynchronize)(CUstream stream);
  CUresult (*StreamQuery)(CUstream stream);
  CUresult (*StreamGetCtx)(CUstream stream, CUcontext *context);
  CUresult (*StreamWaitEvent)(CUstream stream, CUevent event, unsigned flags);
  CUresult (*EventCreate)(CUevent *event, unsigned flags);
  CUresult (*EventDestroy)(CUevent event);
  CUresult (*EventRecord)(CUevent event, CUstream stream);
  CUresult (*EventSynchronize)(CUevent event);
  CUresult (*EventQuery)(CUevent event);
  CUresult (*EventElapsedTime)(float *milliseconds, CUevent start, CUevent end);
  /* image: for CUDA a cubin, PTX or a fatbin; for the emulator a relocatable ELF object for the host's CPU
   * (emulator/kernel.h), PTX or a fatbin. image_bytes lets the emulator check it; the CUDA implementation ignores
   * it. */
  CUresult (*ModuleLoadData)(CUmodule *module, const void *image, size_t image_bytes);
  CUresult (*ModuleUnload)(CUmodule module);
  CUresult (*ModuleGetFunction)(CUfunction *function, CUmodule module, const char *name);
  CUresult (*FuncSetAttribute)(CUfunction function, int attribute, int value);
  CUresult (*LaunchKernel)(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                           unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void **params,
                           void **extra);
  CUresult (*StreamBeginCapture)(CUstream stream, int mode);
  CUresult (*StreamEndCapture)(CUstream stream, CUgraph *graph);
  CUresult (*StreamIsCapturing)(CUstream stream, int *status);
  CUresult (*ThreadExchangeStreamCaptureMode)(int *mode);
  CUresult (*GraphCreate)(CUgraph *graph, unsigned flags);
  CUresult (*GraphAddKernelNode)(CUgraphNode *node, CUgraph graph, const CUgraphNode *before, size_t num_before,
                                 const CUDA_KERNEL_NODE_PARAMS *params);
  CUresult (*GraphAddMemcpyNode)(CUgraphNode *node, CUgraph graph, const CUgraphNode *before, size_t num_before,
                                 const CUDA_MEMCPY3D *params, CUcontext context);
  CUresult (*GraphAddMemsetNode)(CUgraphNode *node, CUgraph graph, const CUgraphNode *before, size_t num_before,
                                 const CUDA_MEMSET_NODE_PARAMS *params, CUcontext context);
  CUresult (*GraphAddChildGraphNode)(CUgraphNode *node, CUgraph graph, const CUgraphNode *before, size_t num_before,
                                     CUgraph child);
  CUresult (*GraphConditionalHandleCreate)(CUgraphConditionalHandle *handle, CUgraph graph, CUcontext context,
                                           unsigned initial, unsigned flags);
  /* edges: NULL, because callers add no edge data */
  CUresult (*GraphAddNode)(CUgraphNode *node, CUgraph graph, const CUgraphNode *before, const CUgraphEdgeData *edges,
                           size_t num_before, CUgraphNodeParams *params);
  CUresult (*GraphGetNodes)(CUgraph graph, CUgraphNode *nodes, size_t *count);
  CUresult (*GraphNodeGetType)(CUgraphNode node, int *type);
  CUresult (*GraphInstantiate)(CUgraphExec *exec, CUgraph graph, unsigned long long flags);
  CUresult (*GraphExecKernelNodeSetParams)(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *params);
  CUresult (*GraphExecMemcpyNodeSetParams)(CUgraphExec exec, CUgraphNode node, const CUDA_MEMCPY3D *params,
                                           CUcontext context);
  CUresult (*GraphExecMemsetNodeSetParams)(CUgraphExec exec, CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS *params,
                                           CUcontext context);
  CUresult (*GraphExecChildGraphNodeSetParams)(CUgraphExec exec, CUgraphNode node, CUgraph child);
  CUresult (*GraphLaunch)(CUgraphExec exec, CUstream stream);
  CUresult (*GraphExecDestroy)(CUgraphExec exec);
  CUresult (*GraphDestroy)(CUgraph graph);
  CUresult (*ImportExternalMemory)(CUexternalMemory *memory, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *desc);
  CUresult (*ExternalMemoryGetMappedBuffer)(CUdeviceptr *address, CUexternalMemory memory,
                                            const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *desc);
  CUresult (*DestroyExternalMemory)(CUexternalMemory memory);
  CUresult (*ImportExternalSemaphore)(CUexternalSemaphore *semaphore, const CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC *desc);
  CUresult (*SignalExternalSemaphoresAsync)(const CUexternalSemaphore *semaphores,
                                            const CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS *params, unsigned count,
                                            CUstream stream);
  CUresult (*WaitExternalSemaphoresAsync)(const CUexternalSemaphore *semaphores,
                                          const CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS *params, unsigned count,
                                          CUstream stream);
  CUresult (*DestroyExternalSemaphore)(CUexternalSemaphore semaphore);
  CUresult (*DeviceGetUuid)(CUuuid *uuid, CUdevice device);
  CUresult (*MemGetAddressRange)(CUdeviceptr *base, size_t *bytes, CUdeviceptr address);
  CUresult (*IpcGetMemHandle)(CUipcMemHandle *handle, CUdeviceptr address);
  CUresult (*IpcOpenMemHandle)(CUdeviceptr *address, CUipcMemHandle handle, unsigned flags);
  CUresult (*IpcCloseMemHandle)(CUdeviceptr address);
  CUresult (*IpcGetEventHandle)(CUipcEventHandle *handle, CUevent event);
  CUresult (*IpcOpenEventHandle)(CUevent *event, CUipcEventHandle handle);

  /* ---- members that CUDA lacks: NULL in the table of the real driver ---- */
  /* Returns the reason why the calling thread's last call failed; "" if the driver gave no reason besides the error
   * code. */
  const char *(*LastErrorText)(void);
  /* Tells the emulated device's checking mode that an allocator of the plugin hands out the first `bytes` bytes of a
   * block of `held` bytes. From then on these bytes count as unwritten, and the rest of the block counts as
   * unallocated. Takes effect in the order of the stream, or at once if the stream is NULL. Returns true if it has
   * enqueued something on the stream. */
  bool (*ReuseMemory)(CUdeviceptr address, size_t bytes, size_t held, CUstream stream);
  /* Returns the number of bytes that the plugin's allocators must leave unused after each block, so that the checking
   * mode detects overruns; 0 outside of that mode. */
  size_t (*RedZone)(void);
} ocp_driver;

#endif
