#include "ort/external/imported_semaphore.h"

#include <unistd.h>

#include "base/host.h"
#include "device/order.h"
#include "device/release.h"
#include "device/stream.h"
#include "ort/data/stream.h"
#include "ort/external/descriptor.h"
#include "ort/external/imported.h"

#define WHAT "external semaphore"

typedef struct imported_semaphore {
  OrtExternalSemaphoreHandle ort; /* first member: ORT's view */
  ocp_imported imported;
  CUexternalSemaphore semaphore;
} imported_semaphore;

static imported_semaphore *semaphore_of(ocp_imported *imported) {
  return (imported_semaphore *)(void *)((char *)imported - offsetof(imported_semaphore, imported));
}

static void destroy(ocp_imported *imported) {
  const CUresult result = imported->device->driver->DestroyExternalSemaphore(semaphore_of(imported)->semaphore);
  ocp_device_released(imported->device, result, "cuDestroyExternalSemaphore");
}

static ocp_imported_kind kind = {
    .name = WHAT,
    .bytes = sizeof(imported_semaphore),
    .offset = offsetof(imported_semaphore, imported),
    .destroy = destroy,
    .lock = PTHREAD_MUTEX_INITIALIZER,
};

/* ---- import ---- */

bool ocp_can_import_semaphores(ocp_device *device) {
  int supported = 0;
  ocp_error ignored;
  OCP_STAY stay = ocp_device_enter(device, &ignored);
  return stay.entered &&
         device->driver->DeviceGetAttribute(&supported, CU_DEVICE_ATTRIBUTE_TIMELINE_SEMAPHORE_INTEROP_SUPPORTED,
                                            device->device) == CUDA_SUCCESS &&
         supported;
}

static void release(OrtExternalSemaphoreHandle *handle) { ocp_release_imported_semaphore(handle); }

static int check(const OrtExternalSemaphoreDescriptor *desc, ocp_error *error) {
  if (!desc)
    return ocp_fail(error, ORT_INVALID_ARGUMENT, WHAT ": the descriptor is NULL");
  if (ocp_check_descriptor_version(desc->version, WHAT, error) != ORT_OK)
    return error->code;
  if (desc->type != ORT_EXTERNAL_SEMAPHORE_VK_TIMELINE_SEMAPHORE_OPAQUE_FD)
    return ocp_fail(error, ORT_NOT_IMPLEMENTED,
                    WHAT ": type %d is not supported on Linux, expected "
                         "ORT_EXTERNAL_SEMAPHORE_VK_TIMELINE_SEMAPHORE_OPAQUE_FD (2)",
                    (int)desc->type);
  return ORT_OK;
}

int ocp_import_semaphore(ocp_device *device, const OrtEpDevice *ep_device, const OrtExternalSemaphoreDescriptor *desc,
                         OrtExternalSemaphoreHandle **out, ocp_error *error) {
  int fd = -1;
  if (check(desc, error) != ORT_OK)
    return error->code;
  OCP_STAY stay = ocp_device_enter(device, error);
  ocp_imported *imported = stay.entered ? ocp_imported_make(&kind, device, error) : NULL;
  if (!imported)
    return error->code;
  imported_semaphore *semaphore = semaphore_of(imported);
  if (ocp_duplicate_descriptor(desc->native_handle, WHAT, &fd, error) != ORT_OK) {
    ocp_imported_discard(imported);
    return error->code;
  }
  const CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC import = {.type = CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_TIMELINE_SEMAPHORE_FD,
                                                      .handle = {.fd = fd}};
  const CUresult result = device->driver->ImportExternalSemaphore(&semaphore->semaphore, &import);
  if (result != CUDA_SUCCESS) {
    close(fd);
    ocp_imported_discard(imported);
    return ocp_device_fail(device, result, WHAT ": cuImportExternalSemaphore", error);
  }
  ocp_close_descriptor(desc->native_handle);
  semaphore->ort = (OrtExternalSemaphoreHandle){
      .version = ocp_api_version, .ep_device = ep_device, .descriptor = *desc, .Release = release};
  semaphore->ort.descriptor.native_handle = NULL; /* closed */
  ocp_imported_hold(imported);
  *out = &semaphore->ort;
  return ORT_OK;
}

void ocp_release_imported_semaphore(OrtExternalSemaphoreHandle *handle) { ocp_imported_release(&kind, handle); }

/* ---- waits and signals ---- */

typedef enum action { WAIT, SIGNAL } action;

/* Enqueues the wait or the signal; the caller has entered the device and has a turn on the stream. */
static int call_driver(const imported_semaphore *semaphore, ocp_stream *stream, action action, uint64_t value,
                       ocp_error *error) {
  const ocp_driver *driver = stream->device->driver;
  CUresult result;
  if (ocp_stream_is_captured(stream))
    return ocp_fail(error, ORT_NOT_IMPLEMENTED,
                    WHAT
                    ": the stream is being captured, and a graph of the plugin contains no waits and signals. Wait "
                    "and signal before and after the capture");
  if (action == WAIT) {
    const CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS params = {.params = {.fence = value}};
    result = driver->WaitExternalSemaphoresAsync(&semaphore->semaphore, &params, 1, stream->handle);
  } else {
    const CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS params = {.params = {.fence = value}};
    result = driver->SignalExternalSemaphoresAsync(&semaphore->semaphore, &params, 1, stream->handle);
  }
  ocp_stream_enqueued(stream); /* also after a failure: the driver may have enqueued something */
  if (result == CUDA_SUCCESS)
    return ORT_OK;
  return ocp_device_fail(
      stream->device, result,
      action == WAIT ? WHAT ": cuWaitExternalSemaphoresAsync" : WHAT ": cuSignalExternalSemaphoresAsync", error);
}

static int enqueue(ocp_device *device, const OrtExternalSemaphoreHandle *handle, OrtSyncStream *ort_stream,
                   action action, uint64_t value, ocp_error *error) {
  ocp_stream *stream = ocp_ort_stream(ort_stream);
  if (!stream)
    return ocp_fail(error, ORT_INVALID_ARGUMENT,
                    WHAT ": the stream is not a stream of " OCP_EP_NAME
                         ". Create it with CreateSyncStreamForEpDevice for the importer's device");
  if (stream->device != device)
    return ocp_fail(error, ORT_INVALID_ARGUMENT,
                    WHAT ": the stream belongs to device %d, and the importer to device %d. Create the stream for the "
                         "importer's device",
                    stream->device->ordinal, device->ordinal);
  OCP_STAY stay = ocp_device_enter(device, error);
  ocp_imported *imported = stay.entered ? ocp_imported_use(&kind, handle, device, error) : NULL;
  if (!imported)
    return error->code;
  if (ocp_stream_try_turn(stream)) {
    call_driver(semaphore_of(imported), stream, action, value, error);
    ocp_stream_end_turn(stream);
  } else {
    ocp_fail(error, ORT_NOT_IMPLEMENTED,
             WHAT ": a Run that ONNX Runtime captures into a CUDA graph uses the stream. Wait and signal before and "
                  "after the Run");
  }
  ocp_imported_end_use(imported);
  return error->code;
}

int ocp_wait_for_semaphore(ocp_device *device, OrtExternalSemaphoreHandle *handle, OrtSyncStream *stream,
                           uint64_t value, ocp_error *error) {
  return enqueue(device, handle, stream, WAIT, value, error);
}

int ocp_signal_semaphore(ocp_device *device, OrtExternalSemaphoreHandle *handle, OrtSyncStream *stream, uint64_t value,
                         ocp_error *error) {
  return enqueue(device, handle, stream, SIGNAL, value, error);
}
