/* ORT's views of device memory: OrtMemoryInfo, OrtAllocator, OrtSyncStreamImpl, OrtDataTransferImpl. The functions with
 * the signature of an OrtEpFactory slot go into that slot as they are; they find the device by the OrtMemoryDevice that
 * ORT names, so that they serve every device of a factory. */
#ifndef OCP_ORT_MEMORY_H
#define OCP_ORT_MEMORY_H

#include "device/memory.h"

/* What an OrtMemoryDevice means. */
typedef enum ocp_place_kind { OCP_PLACE_HOST, OCP_PLACE_DEVICE, OCP_PLACE_PINNED, OCP_PLACE_FOREIGN } ocp_place_kind;
typedef struct ocp_place {
  ocp_place_kind kind;
  bool emulated;
  int ordinal;
} ocp_place;
ocp_place ocp_ort_place(const OrtMemoryDevice *memory_device);

/* The OrtMemoryInfo to advertise for a device (EpDevice_AddAllocatorInfo): device memory, pinned host memory, or device
 * memory for initializers. Made on first use and never released, since ORT keeps the pointer. Does not open the device.
 */
enum { OCP_INFO_DEVICE = 0, OCP_INFO_PINNED = 1, OCP_INFO_READ_ONLY = 2, OCP_NUM_INFOS = 3 };
int ocp_ort_memory_info(bool emulated, int ordinal, int kind, const OrtMemoryInfo **out, ocp_error *error);

/* ---- slots of OrtEpFactory ---- */
/* Options: "arena.<key>". All allocators of one memory share its arena; the first options that anybody gives are the
 * arena's, and where later ones differ a warning names the keys. One of type OrtReadOnlyAllocator bypasses the arena.
 */
OrtStatus *ocp_ort_create_allocator(OrtEpFactory *factory, const OrtMemoryInfo *memory_info,
                                    const OrtKeyValuePairs *options, OrtAllocator **out);
void ocp_ort_release_allocator(OrtEpFactory *factory, OrtAllocator *allocator);
OrtStatus *ocp_ort_create_data_transfer(OrtEpFactory *factory, OrtDataTransferImpl **out);
bool ocp_ort_is_stream_aware(const OrtEpFactory *factory); /* true */
OrtStatus *ocp_ort_create_sync_stream(OrtEpFactory *factory, const OrtMemoryDevice *memory_device,
                                      const OrtKeyValuePairs *options, OrtSyncStreamImpl **out);

/* For OrtEp::Sync: waits until all work enqueued on the device's streams has finished. */
OrtStatus *ocp_ort_synchronize_device(ocp_device *device);

/* ---- for the other ORT views ---- */
/* Takes over a status of ORT's, not NULL: its code and message go into the error, and it is released. */
int ocp_fail_status(ocp_error *error, OrtStatus *status);
/* Fills stream->ort; called where streams are created. */
void ocp_ort_init_stream(ocp_stream *stream);
/* The ocp_stream behind ORT's stream, or NULL when it is NULL or not ours. */
ocp_stream *ocp_ort_stream(OrtSyncStream *stream);
/* The stream that a kernel is to enqueue on, or NULL when ORT runs it without one: then a borrowed stream serves, and
 * the kernel waits for it. */
int ocp_ort_stream_of_context(const OrtKernelContext *context, const ocp_device *device, ocp_stream **out,
                              ocp_error *error);
/* The device that copies between the two tensors' memories: ours that is or owns one of them. NULL with the error. */
ocp_device *ocp_ort_copying_device(const OrtValue *src, const OrtValue *dst, ocp_error *error);
/* Why a tensor has no memory: why the calling thread's latest failed allocation through ORT's allocators failed. */
const char *ocp_ort_why_no_memory(void);
/* What ORT's allocators give on this thread is for work on the stream, or for anybody when it is NULL. */
void ocp_ort_allocating_on(ocp_stream *stream);
/* Copies a tensor into one of the same size, between any two of host, pinned and device memory of the device (or of two
 * devices of one kind). Asynchronous when a stream of the copying device is given, with CUDA's semantics for pageable
 * host memory; else done on return, and after all work that the calling thread can have heard of. */
int ocp_ort_copy_tensor(const OrtValue *src, OrtValue *dst, ocp_stream *stream, ocp_error *error);

#endif
