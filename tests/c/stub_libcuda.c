/* A stub of libcuda.so.1 for machines without a driver. cuDNN loads, and sees no device (CUDA_ERROR_NO_DEVICE).
 * Functions that only create objects, as planning needs them, succeed. */
#define ABSENT(name)                                                                                                   \
  int name(void) { return 100; }
#define DONE(name)                                                                                                     \
  int name(void) { return 0; }
#define MADE(name)                                                                                                     \
  int name(void **handle) {                                                                                            \
    static int made;                                                                                                   \
    if (handle)                                                                                                        \
      *handle = &made;                                                                                                 \
    return 0;                                                                                                          \
  }

ABSENT(cuCtxGetCurrent)
ABSENT(cuCtxGetLimit)
ABSENT(cuCtxPopCurrent)
ABSENT(cuCtxPushCurrent)
ABSENT(cuDeviceGet)
ABSENT(cuDeviceGetCount)
ABSENT(cuDriverGetVersion)
ABSENT(cuGetErrorName)
ABSENT(cuGetErrorString)
ABSENT(cuKernelGetAttribute)
ABSENT(cuLaunchCooperativeKernel)
ABSENT(cuLaunchKernel)
ABSENT(cuLaunchKernelEx)
ABSENT(cuLibraryLoadFromFile)
ABSENT(cuLinkAddData)
ABSENT(cuLinkComplete)
ABSENT(cuLinkCreate)
ABSENT(cuLinkDestroy)
ABSENT(cuOccupancyMaxPotentialClusterSize)
ABSENT(cuStreamGetCtx)
ABSENT(cuTensorMapEncodeIm2col)
ABSENT(cuTensorMapEncodeTiled)
DONE(cuKernelSetAttribute)
DONE(cuLibraryUnload)
DONE(cuModuleUnload)
MADE(cuKernelGetFunction)
MADE(cuLibraryGetKernel)
MADE(cuLibraryLoadData)
MADE(cuModuleGetFunction)
MADE(cuModuleLoadData)
