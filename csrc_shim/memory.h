/* Devices, device and pinned memory, streams. C callers only; ORT's view of them (OrtAllocator, OrtSyncStreamImpl,
 * OrtDataTransferImpl) is in ort_memory.c. */
#ifndef OCP_MEMORY_H
#define OCP_MEMORY_H

#include "core.h"

struct ocp_device {
  const ocp_driver *driver;
  CUcontext context;
  CUdevice device;
  int ordinal;
  bool emulated;
  uint32_t vendor_id; /* of its OrtMemoryDevice: NVIDIA's, or the emulator's own */
  int cc_major, cc_minor;
  atomic_int lost;       /* a sticky CUDA error, 0 while healthy; set once */
  struct ocp_pool *pool; /* private to memory.c: cached device memory; the arena's place */
};

/* The device with that ordinal, opened on first use (thread safe), or NULL with the error. Never closed. */
ocp_device *ocp_device_open(bool emulated, int ordinal, ocp_error *error);
/* Makes the device's context current on the calling thread; cheap when it already is. */
int ocp_device_enter(ocp_device *device, ocp_error *error);

/* ocp_stream: a CUDA stream and what is ordered on it. */
struct ocp_stream {
  OrtSyncStreamImpl ort; /* first member: ORT's view */
  ocp_device *device;
  CUstream handle;
  bool owned;
  void *cublaslt, *cudnn; /* library handles, made on first use by library.c */
  struct ocp_stream_private *priv;
};
/* stream_of_handle finds our stream for a raw handle (ORT < 1.28 gives only that); NULL when it is not ours. */
int ocp_stream_create(ocp_device *device, ocp_stream **out, ocp_error *error);
void ocp_stream_release(ocp_stream *stream);
int ocp_stream_synchronize(ocp_stream *stream, ocp_error *error);
ocp_stream *ocp_stream_of_handle(void *handle);

/* Device memory, at least 256-byte aligned, never host readable. Free is stream ordered when stream is not NULL: the
 * memory may be handed out again to work enqueued later on the same stream at once, and to other streams after what is
 * enqueued now has finished. bytes == 0 gives a valid address of its own. */
int ocp_device_alloc(ocp_device *device, size_t bytes, ocp_stream *stream, CUdeviceptr *address, ocp_error *error);
void ocp_device_free(ocp_device *device, CUdeviceptr address, ocp_stream *stream);

#endif
