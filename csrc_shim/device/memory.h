/* Devices, device and pinned memory, streams. C callers only; ORT's views of them are in ort/allocator.c, ort/memory.c
 * and ort/stream.c. */
#ifndef OCP_DEVICE_MEMORY_H
#define OCP_DEVICE_MEMORY_H

#include "base/core.h"

/* Vendor ids of OrtMemoryDevices. PCI vendor ids have 16 bits, so no EP for real hardware has the emulated one. */
enum { OCP_VENDOR_NVIDIA = 0x10DE, OCP_VENDOR_EMULATED = 0x10DE0E };
/* That of the device's memory. The emulated device has NVIDIA's where the process sees no GPU, so that "cuda" in IO
 * binding and DLPack mean it; beside a GPU it has its own. The same as long as the process lives. */
uint32_t ocp_vendor_id(bool emulated);

struct ocp_device {
  const ocp_driver *driver;
  CUcontext context;
  CUdevice device;
  int ordinal;
  bool emulated;
  int cc_major, cc_minor;
  size_t total_bytes;
  atomic_int lost;       /* a sticky CUDA error, 0 while healthy; set once */
  struct ocp_pool *pool; /* pool.h: the arenas, and the order of the streams */
};

enum { OCP_MAX_DEVICES = 64 };
/* The device with that ordinal, opened on first use (thread safe), or NULL with the error. Never closed. */
ocp_device *ocp_device_open(bool emulated, int ordinal, ocp_error *error);
/* The same if it is open, else NULL. */
ocp_device *ocp_device_find(bool emulated, int ordinal);
/* Fails when the device is lost, and in a forked child. */
int ocp_device_check(const ocp_device *device, ocp_error *error);
/* ocp_device_check, and makes the device's context current on the calling thread; cheap when it already is. */
int ocp_device_enter(ocp_device *device, ocp_error *error);
/* Makes the context current for calls that give something back, which a lost device takes back as well. False in a
 * forked child, where nothing of the device's can be touched. */
bool ocp_device_enter_to_release(const ocp_device *device);
/* ocp_fail_cuda that also marks the device lost when the error is a sticky one. */
int ocp_device_fail(ocp_device *device, CUresult result, const char *what, ocp_error *error);
/* Waits for all of the device's streams. */
int ocp_device_synchronize(ocp_device *device, ocp_error *error);
/* Waits for all work that the calling thread can have heard of. Not for that of Runs which other threads are in: their
 * results are nobody's before they end. For who reads or writes memory and does not know on which streams it was used.
 */
int ocp_device_settle(ocp_device *device, ocp_error *error);
/* Around each Run, on its thread: until the Run ends its work is the thread's alone; what was not waited for then is
 * anybody's. */
void ocp_run_started(void);
void ocp_run_ended(ocp_device *device, bool waited);

/* ocp_stream: a CUDA stream and what is ordered on it. */
struct ocp_stream {
  OrtSyncStreamImpl ort; /* first member: ORT's view */
  ocp_device *device;
  CUstream handle;
  bool owned;             /* by us; else by the application, which keeps it alive as long as sessions use it */
  void *cublaslt, *cudnn; /* library handles, made on first use by vendor/problem.c */
  atomic_bool capturing;  /* set by who captures it into a graph, in a turn alone */
  struct ocp_stream_private *priv;
};
int ocp_stream_create(ocp_device *device, ocp_stream **out, ocp_error *error);
/* The application's stream with that handle (NULL: the default stream); the same object for all who adopt it. Fails
 * where the driver does not know it, or it is of another context than the device's primary one. */
int ocp_stream_adopt(ocp_device *device, CUstream handle, ocp_stream **out, ocp_error *error);
/* One more user, who releases it; returns the stream. */
ocp_stream *ocp_stream_share(ocp_stream *stream);
/* Waits for its work and ends it when nobody else uses it. */
void ocp_stream_release(ocp_stream *stream);
int ocp_stream_synchronize(ocp_stream *stream, ocp_error *error);
/* Whether the driver captures it, for whomever. */
bool ocp_stream_is_captured(const ocp_stream *stream);
/* Ends the capture of the stream, in a turn alone: its graph, or NULL and the error. Where that leaves the capture open
 * it is tried once more at once, and again before a Run uses the stream. */
CUresult ocp_stream_end_capture(ocp_stream *stream, CUgraph *graph);
int ocp_stream_close_capture(ocp_stream *stream, ocp_error *error);
/* A Run's turn on a stream that several share: `alone` waits until nobody else has one and keeps others out, since a
 * capture takes in whatever is enqueued on the stream. The try does not wait, and fails during a turn alone. */
void ocp_stream_take_turn(ocp_stream *stream, bool alone);
bool ocp_stream_try_turn(ocp_stream *stream);
void ocp_stream_end_turn(ocp_stream *stream);
/* Our stream of a device, or of any, for a raw handle; NULL when there is none. Default streams have the same handle on
 * every device. */
ocp_stream *ocp_stream_of_handle(const ocp_device *device, void *handle);
/* Our stream with that view for ORT; NULL when there is none. What the pointer points to is not looked at. */
ocp_stream *ocp_stream_of_impl(const OrtSyncStreamImpl *impl);
/* A stream for work that comes without one, kept for the next who borrows: cheaper than creating one. */
int ocp_stream_borrow(ocp_device *device, ocp_stream **out, ocp_error *error);
void ocp_stream_return(ocp_stream *stream);
/* Says that work was enqueued on the stream; called by everyone who enqueues, before memory that the work uses can be
 * freed without naming the stream. ocp_device_free on the stream says it too. */
void ocp_stream_enqueued(ocp_stream *stream);

/* Device memory, at least 256-byte aligned, never host readable; bytes == 0 gives a valid address of its own. The
 * memory may be used by work enqueued on `stream`, or by anybody at once when that is NULL. While a graph is captured
 * on the stream, only what needs no call of the driver is given; what a graph refers to must not be freed before it.
 *
 * Free is stream ordered. On a stream: all that used the memory is ordered before the stream's end; later work on the
 * stream can get it at once, other streams when that has finished. With NULL: any stream may have used it; a stream can
 * get it again once what is enqueued now on the other streams has finished. */
int ocp_device_alloc(ocp_device *device, size_t bytes, ocp_stream *stream, CUdeviceptr *address, ocp_error *error);
void ocp_device_free(ocp_device *device, CUdeviceptr address, ocp_stream *stream);
/* Memory of its own for what lives long and is only read, such as weights: past the arena, for anybody at once. Freed
 * by ocp_device_free. */
int ocp_device_reserve(ocp_device *device, size_t bytes, CUdeviceptr *address, ocp_error *error);

/* Gives memory that no enqueued work uses back to the driver, and the streams that nobody borrows. Returns the bytes of
 * both kinds of memory. */
int64_t ocp_device_trim(ocp_device *device);

/* Somebody who keeps device memory that he can do without, such as the slabs of instances that no Run is using. When
 * memory runs out, reclaim is called, on any thread that allocates and on none of whose behalf a lock of ours is held;
 * it frees what it can. Removing one waits for a call in progress. */
typedef struct ocp_reclaimer {
  struct ocp_reclaimer *next;
  void (*reclaim)(struct ocp_reclaimer *self);
} ocp_reclaimer;
void ocp_reclaimer_add(ocp_device *device, ocp_reclaimer *reclaimer);
void ocp_reclaimer_remove(ocp_device *device, ocp_reclaimer *reclaimer);

#endif
