/* Interface between mock_host.c and mock_sessions.c: the objects of one registration of the library, and helpers. */
#ifndef OCP_TESTS_MOCK_HOST_H
#define OCP_TESTS_MOCK_HOST_H

#include "mock_ort.h"

#define FLOAT ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT

extern OrtEpFactory *factory;
extern OrtMemoryDevice device_memory, pinned_memory, other_device_memory;
extern OrtAllocator *device_allocator, *pinned_allocator;
extern OrtDataTransferImpl *transfer;
extern ocp_device *device;
extern CUcontext host_context; /* a context of a device that the application uses itself */

/* Makes the context of another device current on the calling thread; NULL: none. From then on, each check also verifies
 * that the library has restored it. */
void be_elsewhere(CUcontext context);
void check_elsewhere(void);
void check_fails(OrtStatus *status, const char *with); /* expects a failure whose text contains `with` */
void check_ok(OrtStatus *status);
OrtSyncStream make_stream(void);
void finish_run(OrtSyncStream *stream);
void copy(const OrtValue *src, OrtValue *dst, OrtSyncStream *stream);

/* mock_sessions.c: runs two clusters with the kernels of the image, `runs` Runs on each of two threads per cluster, and
 * calls with hostile values. */
void test_sessions(const void *image, size_t bytes, int runs);

#endif
