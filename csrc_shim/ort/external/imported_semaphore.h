/* Timeline semaphores of another API, imported by their file descriptor. Streams wait for them and signal them. */
#ifndef OCP_ORT_EXTERNAL_IMPORTED_SEMAPHORE_H
#define OCP_ORT_EXTERNAL_IMPORTED_SEMAPHORE_H

#include "base/error.h"
#include "device/device.h"

/* Whether the device can import timeline semaphores. */
bool ocp_can_import_semaphores(ocp_device *device);
/* Imports the semaphore. On success the plugin owns the file descriptor; on failure it remains the caller's. */
int ocp_import_semaphore(ocp_device *device, const OrtEpDevice *ep_device, const OrtExternalSemaphoreDescriptor *desc,
                         OrtExternalSemaphoreHandle **out, ocp_error *error);
/* Releases the application's handle. The semaphore is destroyed when the work that was enqueued until then has
 * finished. */
void ocp_release_imported_semaphore(OrtExternalSemaphoreHandle *handle);
/* Enqueue a wait until the semaphore has at least this value, or a signal that sets the value. Neither blocks the
 * calling thread. */
int ocp_wait_for_semaphore(ocp_device *device, OrtExternalSemaphoreHandle *handle, OrtSyncStream *stream,
                           uint64_t value, ocp_error *error);
int ocp_signal_semaphore(ocp_device *device, OrtExternalSemaphoreHandle *handle, OrtSyncStream *stream, uint64_t value,
                         ocp_error *error);

#endif
