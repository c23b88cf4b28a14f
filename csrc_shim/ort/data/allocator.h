/* OrtMemoryInfo and OrtAllocator over the arenas. */
#ifndef OCP_ORT_DATA_ALLOCATOR_H
#define OCP_ORT_DATA_ALLOCATOR_H

#include "base/error.h"
#include "device/stream.h"

/* Returns the OrtMemoryInfo to advertise for a device (EpDevice_AddAllocatorInfo): device memory, pinned host memory,
 * or device memory for initializers. It is made on first use and never released, since ORT keeps the pointer. Does not
 * open the device. */
enum { OCP_INFO_DEVICE = 0, OCP_INFO_PINNED = 1, OCP_INFO_READ_ONLY = 2, OCP_NUM_INFOS = 3 };
int ocp_ort_memory_info(bool emulated, int ordinal, int kind, const OrtMemoryInfo **out, ocp_error *error);

/* ---- slots of OrtEpFactory ---- */
/* The slots CreateAllocator and ReleaseAllocator. `options` has keys "arena.<key>" (device/arena_options.h). All
 * allocators for one memory of a device share one arena, which keeps the first options that it gets; if later options
 * differ, a warning names their keys. An allocator of type OrtReadOnlyAllocator bypasses the arena. */
OrtStatus *ocp_ort_create_allocator(OrtEpFactory *factory, const OrtMemoryInfo *memory_info,
                                    const OrtKeyValuePairs *options, OrtAllocator **out);
void ocp_ort_release_allocator(OrtEpFactory *factory, OrtAllocator *allocator);

/* ---- for other files of ort/ ---- */
/* Returns the reason why a tensor has no memory: the error of the calling thread's latest failed allocation through
 * ORT's allocators; if none has failed on this thread, a text that refers to ORT's log. */
const char *ocp_ort_why_no_memory(void);
/* Declares who will use the memory that ORT's allocators return on this thread: work on the stream, or any work if
 * `stream` is NULL. */
void ocp_ort_allocating_on(ocp_stream *stream);

#endif
