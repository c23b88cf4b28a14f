#include "ort/data/memory.h"

#include <stdlib.h>
#include <string.h>

#include "base/counters.h"
#include "base/host.h"
#include "device/memory/preserve.h"
#include "device/open/devices.h"
#include "device/order.h"
#include "device/run_memory.h"
#include "device/wait.h"
#include "driver/driver.h"
#include "ort/data/allocator.h"
#include "ort/data/capture.h"
#include "ort/data/place.h"
#include "ort/data/stream.h"

static bool is_ours(ocp_place where) { return where.kind == OCP_PLACE_DEVICE || where.kind == OCP_PLACE_PINNED; }

static OrtStatus *failure(OrtErrorCode code, const char *text) { return ocp_api->CreateStatus(code, text); }

/* ---- copies ---- */

/* Fails a copy during a capture, because replays of the graph would lack the copy. */
static int refuse_in_capture(ocp_stream *stream, ocp_error *error) {
  ocp_capture_computed(stream, false);
  return ocp_fail(error, ORT_NOT_IMPLEMENTED,
                  "a captured Run cannot copy from or to host memory: bind inputs and outputs on the device "
                  "(IO binding), or run with gpu_graph_id=-1, or outside of the application's capture");
}

/* The copies of one call. The device's context stays current between the copies. The stream's sequence number advances
 * once, after the last copy: the caller keeps all tensors alive until then. */
typedef struct batch {
  const ocp_device *device; /* the device whose context is current; NULL: no copy has begun yet */
  ocp_stay stay;
  ocp_stream *stream; /* the stream with copies that its sequence number does not count yet; NULL: no stream */
} batch;

static void record_progress(batch *copies) {
  if (copies->stream)
    ocp_stream_enqueued(copies->stream);
  copies->stream = NULL;
}

static void end_batch(batch *copies) {
  record_progress(copies);
  ocp_device_leave(&copies->stay);
  copies->device = NULL;
}
#define BATCH __attribute__((cleanup(end_batch))) batch

static int enter(batch *copies, ocp_device *device, ocp_error *error) {
  if (copies->device == device)
    return ORT_OK;
  end_batch(copies);
  copies->stay = ocp_device_enter(device, error);
  if (!copies->stay.entered)
    return error->code;
  copies->device = device;
  return ORT_OK;
}

static int enqueue_copy(batch *copies, ocp_stream *stream, void *dst, bool dst_on_device, const void *src,
                        bool src_on_device, size_t bytes, ocp_error *error) {
  const ocp_driver *driver = stream->device->driver;
  if (atomic_load_explicit(&stream->capturing, memory_order_relaxed) && !(src_on_device && dst_on_device))
    return refuse_in_capture(stream, error);
  CUdeviceptr dst_address = (CUdeviceptr)(uintptr_t)dst, src_address = (CUdeviceptr)(uintptr_t)src;
  CUresult result;
  const char *what;
  if (copies->stream != stream)
    record_progress(copies);
  copies->stream = stream;
  if (!src_on_device) {
    what = "cuMemcpyHtoDAsync";
    result = driver->MemcpyHtoDAsync(dst_address, src, bytes, stream->handle);
    ocp_count(OCP_COPIES_H2D, 1);
  } else if (!dst_on_device) {
    what = "cuMemcpyDtoHAsync";
    result = driver->MemcpyDtoHAsync(dst, src_address, bytes, stream->handle);
    ocp_count(OCP_COPIES_D2H, 1);
  } else {
    what = "cuMemcpyDtoDAsync";
    result = driver->MemcpyDtoDAsync(dst_address, src_address, bytes, stream->handle);
    ocp_count(OCP_COPIES_D2D, 1);
  }
  return result == CUDA_SUCCESS ? ORT_OK : ocp_device_fail(stream->device, result, what, error);
}

/* Waits for all work whose results the caller can have, because a call without a stream does not say which work made
 * the source. ORT passes no stream even for some tensors that a stream computed: a graph input that is also an output,
 * or a value that the application copies after an asynchronous Run. */
static int settle(ocp_device *device, ocp_device *other, ocp_error *error) {
  if (ocp_run_memory_is_captured())
    return refuse_in_capture(NULL, error);
  if (other && other != device && ocp_device_settle(other, error) != ORT_OK)
    return error->code;
  return ocp_device_settle(device, error);
}

static int copy(batch *copies, ocp_device *device, void *dst, bool dst_on_device, const void *src, bool src_on_device,
                size_t bytes, ocp_stream *stream, ocp_error *error) {
  if (bytes == 0)
    return ORT_OK;
  if (enter(copies, device, error) != ORT_OK)
    return error->code;
  if (!dst_on_device && !src_on_device) {
    if (!stream || ocp_stream_synchronize(stream, error) == ORT_OK)
      memcpy(dst, src, bytes);
    return error->code;
  }
  if (stream)
    return enqueue_copy(copies, stream, dst, dst_on_device, src, src_on_device, bytes, error);
  if (ocp_stream_borrow(device, &stream, error) != ORT_OK)
    return error->code;
  const int code = enqueue_copy(copies, stream, dst, dst_on_device, src, src_on_device, bytes, error);
  record_progress(copies);
  if (code == ORT_OK)
    ocp_stream_synchronize(stream, error);
  ocp_stream_return(stream);
  return error->code;
}

/* ---- OrtDataTransferImpl ---- */

static bool can_copy(const OrtDataTransferImpl *this_ptr, const OrtMemoryDevice *src_memory_device,
                     const OrtMemoryDevice *dst_memory_device) {
  (void)this_ptr;
  ocp_place src = ocp_ort_place(src_memory_device), dst = ocp_ort_place(dst_memory_device);
  if (src.kind == OCP_PLACE_FOREIGN || dst.kind == OCP_PLACE_FOREIGN || (!is_ours(src) && !is_ours(dst)))
    return false;
  return !is_ours(src) || !is_ours(dst) || src.emulated == dst.emulated;
}

static ocp_place memory_of(const OrtValue *tensor) { return ocp_ort_place(ocp_ep_api->Value_GetMemoryDevice(tensor)); }

static ocp_device *copying_device(ocp_place from, ocp_place to, ocp_error *error) {
  ocp_place ours = to.kind == OCP_PLACE_DEVICE ? to : from.kind == OCP_PLACE_DEVICE || !is_ours(to) ? from : to;
  if (is_ours(ours) && from.kind != OCP_PLACE_FOREIGN && to.kind != OCP_PLACE_FOREIGN)
    return ocp_device_open(ours.emulated, ours.ordinal, error);
  static const char *const names[] = {[OCP_PLACE_HOST] = "host memory",
                                      [OCP_PLACE_DEVICE] = "a device of the plugin",
                                      [OCP_PLACE_PINNED] = "pinned memory of the plugin",
                                      [OCP_PLACE_FOREIGN] = "a device of another provider"};
  ocp_fail(error, ORT_INVALID_ARGUMENT,
           OCP_EP_NAME " cannot copy a tensor from %s to %s. It copies between host memory and its own devices, and "
                       "from one of its own devices to another",
           names[from.kind], names[to.kind]);
  return NULL;
}

ocp_device *ocp_ort_copying_device(const OrtValue *src, const OrtValue *dst, ocp_error *error) {
  return copying_device(memory_of(src), memory_of(dst), error);
}

/* Returns the open device that owns the memory; NULL for host memory, and for a device that is not open. */
static ocp_device *device_of(ocp_place where) {
  return is_ours(where) ? ocp_device_find(where.emulated, where.ordinal) : NULL;
}

static int copy_tensor(batch *copies, const OrtValue *src, OrtValue *dst, ocp_stream *stream, ocp_error *error) {
  size_t src_bytes = 0, dst_bytes = 0;
  const void *src_data = NULL;
  void *dst_data = NULL;
  OrtStatus *status = NULL;
  if ((status = ocp_api->GetTensorSizeInBytes(src, &src_bytes)) ||
      (status = ocp_api->GetTensorSizeInBytes(dst, &dst_bytes)) || (status = ocp_api->GetTensorData(src, &src_data)) ||
      (status = ocp_api->GetTensorMutableData(dst, &dst_data)))
    return ocp_fail_status(error, status);
  if (src_bytes != dst_bytes)
    return ocp_fail(error, ORT_INVALID_ARGUMENT,
                    "cannot copy a tensor of %zu bytes into one of %zu bytes, expected equal sizes", src_bytes,
                    dst_bytes);
  if (dst_bytes && (!src_data || !dst_data))
    return ocp_fail(error, ORT_RUNTIME_EXCEPTION, "cannot copy a tensor without memory: %s", ocp_ort_why_no_memory());
  const ocp_place from = memory_of(src), to = memory_of(dst);
  ocp_device *device = copying_device(from, to, error);
  if (!device)
    return error->code;
  const bool from_device = from.kind == OCP_PLACE_DEVICE, to_device = to.kind == OCP_PLACE_DEVICE;
  if (stream && stream->device != device)
    stream = NULL; /* the stream orders nothing on the other device */
  /* ORT repeats a Run before it captures it. If the Run has read the destination, saves its contents, so that each
   * repetition starts from the same inputs. kept=false: the copy may change these contents. */
  if (to_device && ocp_preserve_is_wanted(device) &&
      ocp_preserve_writes((uint64_t)(uintptr_t)dst_data, dst_bytes, /*kept=*/false, stream, error) != ORT_OK)
    return error->code;
  if (!stream && dst_bytes) {
    record_progress(copies);
    if (settle(device, device_of(from), error) != ORT_OK)
      return error->code;
  }
  return copy(copies, device, dst_data, to_device, src_data, from_device, src_bytes, stream, error);
}

int ocp_ort_copy_tensor(const OrtValue *src, OrtValue *dst, ocp_stream *stream, ocp_error *error) {
  BATCH copies = {0};
  return copy_tensor(&copies, src, dst, stream, error);
}

int ocp_ort_copy_to_device(ocp_stream *stream, void *dst, size_t room, const OrtValue *src, size_t *bytes,
                           ocp_error *error) {
  const void *data = NULL;
  OrtStatus *status = ocp_api->GetTensorSizeInBytes(src, bytes);
  if (status || (status = ocp_api->GetTensorData(src, &data)))
    return ocp_fail_status(error, status);
  if (*bytes > room)
    return ocp_fail(error, ORT_INVALID_ARGUMENT,
                    "cannot copy a tensor of %zu bytes into a buffer of %zu bytes. Use a larger buffer", *bytes, room);
  if (*bytes && (!data || !dst))
    return ocp_fail(error, ORT_RUNTIME_EXCEPTION, "cannot copy a tensor without memory: %s", ocp_ort_why_no_memory());
  BATCH copies = {0};
  return copy(&copies, stream->device, dst, /*dst_on_device=*/true, data, memory_of(src).kind == OCP_PLACE_DEVICE,
              *bytes, stream, error);
}

static OrtStatus *copy_tensors(OrtDataTransferImpl *this_ptr, const OrtValue **src_tensors, OrtValue **dst_tensors,
                               OrtSyncStream **streams, size_t num_tensors) {
  (void)this_ptr;
  BATCH copies = {0};
  ocp_error error;
  error.code = ORT_OK; /* error.text stays uninitialized: it is read only after a failure */
  for (size_t i = 0; i < num_tensors; i++)
    if (copy_tensor(&copies, src_tensors[i], dst_tensors[i], ocp_ort_stream(streams ? streams[i] : NULL), &error) !=
        ORT_OK)
      break;
  return ocp_status(&error);
}

static void release_data_transfer(OrtDataTransferImpl *this_ptr) { free(this_ptr); }

OrtStatus *ocp_ort_create_data_transfer(OrtEpFactory *factory, OrtDataTransferImpl **out) {
  (void)factory;
  *out = calloc(1, sizeof **out);
  if (!*out)
    return failure(ORT_FAIL, OCP_OUT_OF_HOST_MEMORY);
  **out = (OrtDataTransferImpl){.ort_version_supported = ocp_api_version,
                                .Release = release_data_transfer,
                                .CanCopy = can_copy,
                                .CopyTensors = copy_tensors};
  return NULL;
}
