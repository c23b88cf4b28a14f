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

/* The graph would be replayed without the copy: fail. */
static int refuse_in_capture(ocp_stream *stream, ocp_error *error) {
  ocp_capture_computed(stream, false);
  return ocp_fail(error, ORT_NOT_IMPLEMENTED,
                  "a captured CUDA graph cannot copy from or to host memory: bind inputs and outputs on the device "
                  "(IO binding), or run with gpu_graph_id=-1");
}

static int enqueue_copy(ocp_stream *stream, void *dst, bool dst_on_device, const void *src, bool src_on_device,
                        size_t bytes, ocp_error *error) {
  const ocp_driver *driver = stream->device->driver;
  if (atomic_load_explicit(&stream->capturing, memory_order_relaxed) && !(src_on_device && dst_on_device))
    return refuse_in_capture(stream, error);
  CUdeviceptr dst_address = (CUdeviceptr)(uintptr_t)dst, src_address = (CUdeviceptr)(uintptr_t)src;
  CUresult result;
  const char *what;
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
  ocp_stream_enqueued(stream);
  return result == CUDA_SUCCESS ? ORT_OK : ocp_device_fail(stream->device, result, what, error);
}

/* Waits for all work whose results the caller can have: without a stream nothing says which work made the source. ORT
 * passes no stream even for tensors that a stream computed: a graph input that is also an output, or a value that the
 * application copies after an asynchronous Run. */
static int settle(ocp_device *device, ocp_device *other, ocp_error *error) {
  if (ocp_run_memory_is_captured())
    return refuse_in_capture(NULL, error);
  if (other && other != device && ocp_device_settle(other, error) != ORT_OK)
    return error->code;
  return ocp_device_settle(device, error);
}

static int copy(ocp_device *device, void *dst, bool dst_on_device, const void *src, bool src_on_device, size_t bytes,
                ocp_stream *stream, ocp_error *error) {
  if (bytes == 0)
    return ORT_OK;
  OCP_STAY stay = ocp_device_enter(device, error);
  if (!stay.entered)
    return error->code;
  if (!dst_on_device && !src_on_device) {
    if (!stream || ocp_stream_synchronize(stream, error) == ORT_OK)
      memcpy(dst, src, bytes);
    return error->code;
  }
  if (stream)
    return enqueue_copy(stream, dst, dst_on_device, src, src_on_device, bytes, error);
  if (ocp_stream_borrow(device, &stream, error) != ORT_OK)
    return error->code;
  if (enqueue_copy(stream, dst, dst_on_device, src, src_on_device, bytes, error) == ORT_OK)
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

ocp_device *ocp_ort_copying_device(const OrtValue *src, const OrtValue *dst, ocp_error *error) {
  ocp_place from = ocp_ort_place(ocp_ep_api->Value_GetMemoryDevice(src)),
            to = ocp_ort_place(ocp_ep_api->Value_GetMemoryDevice(dst));
  ocp_place ours = to.kind == OCP_PLACE_DEVICE ? to : from.kind == OCP_PLACE_DEVICE || !is_ours(to) ? from : to;
  if (is_ours(ours) && from.kind != OCP_PLACE_FOREIGN && to.kind != OCP_PLACE_FOREIGN)
    return ocp_device_open(ours.emulated, ours.ordinal, error);
  ocp_fail(error, ORT_INVALID_ARGUMENT, OCP_EP_NAME " cannot copy between these devices");
  return NULL;
}

/* Finds our device that holds the tensor's memory, or NULL. */
static ocp_device *device_of(const OrtValue *tensor) {
  const ocp_place where = ocp_ort_place(ocp_ep_api->Value_GetMemoryDevice(tensor));
  return is_ours(where) ? ocp_device_find(where.emulated, where.ordinal) : NULL;
}

int ocp_ort_copy_tensor(const OrtValue *src, OrtValue *dst, ocp_stream *stream, ocp_error *error) {
  size_t src_bytes = 0, dst_bytes = 0;
  const void *src_data = NULL;
  void *dst_data = NULL;
  OrtStatus *status = NULL;
  if ((status = ocp_api->GetTensorSizeInBytes(src, &src_bytes)) ||
      (status = ocp_api->GetTensorSizeInBytes(dst, &dst_bytes)) || (status = ocp_api->GetTensorData(src, &src_data)) ||
      (status = ocp_api->GetTensorMutableData(dst, &dst_data)))
    return ocp_fail_status(error, status);
  if (src_bytes != dst_bytes)
    return ocp_fail(error, ORT_INVALID_ARGUMENT, "cannot copy a tensor of %zu bytes into one of %zu", src_bytes,
                    dst_bytes);
  if (dst_bytes && (!src_data || !dst_data))
    return ocp_fail(error, ORT_RUNTIME_EXCEPTION, "cannot copy a tensor without memory: %s", ocp_ort_why_no_memory());
  ocp_device *device = ocp_ort_copying_device(src, dst, error);
  if (!device)
    return error->code;
  bool from_device = ocp_ort_place(ocp_ep_api->Value_GetMemoryDevice(src)).kind == OCP_PLACE_DEVICE;
  bool to_device = ocp_ort_place(ocp_ep_api->Value_GetMemoryDevice(dst)).kind == OCP_PLACE_DEVICE;
  if (stream && stream->device != device)
    stream = NULL; /* the stream orders nothing on the other device */
  /* In a Run that is repeated, host data copied to the device is new in each repetition: a value of the CPU
   * provider. */
  if (to_device && ocp_preserve_is_wanted(device) &&
      ocp_preserve_writes((uint64_t)(uintptr_t)dst_data, dst_bytes, /*kept=*/false, stream, error) != ORT_OK)
    return error->code;
  if (!stream && dst_bytes && settle(device, device_of(src), error) != ORT_OK)
    return error->code;
  return copy(device, dst_data, to_device, src_data, from_device, src_bytes, stream, error);
}

int ocp_ort_copy_to_device(ocp_stream *stream, void *dst, size_t room, const OrtValue *src, size_t *bytes,
                           ocp_error *error) {
  const void *data = NULL;
  OrtStatus *status = ocp_api->GetTensorSizeInBytes(src, bytes);
  if (status || (status = ocp_api->GetTensorData(src, &data)))
    return ocp_fail_status(error, status);
  if (*bytes > room)
    return ocp_fail(error, ORT_INVALID_ARGUMENT, "cannot copy a tensor of %zu bytes to where %zu are left", *bytes,
                    room);
  if (*bytes && (!data || !dst))
    return ocp_fail(error, ORT_RUNTIME_EXCEPTION, "cannot copy a tensor without memory: %s", ocp_ort_why_no_memory());
  const bool from_device = ocp_ort_place(ocp_ep_api->Value_GetMemoryDevice(src)).kind == OCP_PLACE_DEVICE;
  return copy(stream->device, dst, /*dst_on_device=*/true, data, from_device, *bytes, stream, error);
}

static OrtStatus *copy_tensors(OrtDataTransferImpl *this_ptr, const OrtValue **src_tensors, OrtValue **dst_tensors,
                               OrtSyncStream **streams, size_t num_tensors) {
  (void)this_ptr;
  ocp_error error = {0};
  for (size_t i = 0; i < num_tensors; i++)
    if (ocp_ort_copy_tensor(src_tensors[i], dst_tensors[i], ocp_ort_stream(streams ? streams[i] : NULL), &error) !=
        ORT_OK)
      break;
  return ocp_status(&error);
}

static void release_data_transfer(OrtDataTransferImpl *this_ptr) { free(this_ptr); }

OrtStatus *ocp_ort_create_data_transfer(OrtEpFactory *factory, OrtDataTransferImpl **out) {
  (void)factory;
  *out = calloc(1, sizeof **out);
  if (!*out)
    return failure(ORT_FAIL, "out of host memory");
  **out = (OrtDataTransferImpl){.ort_version_supported = ocp_api_version,
                                .Release = release_data_transfer,
                                .CanCopy = can_copy,
                                .CopyTensors = copy_tensors};
  return NULL;
}
