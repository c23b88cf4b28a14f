#include "ort/external/importer.h"

#include <stdlib.h>

#include "base/host.h"
#include "device/retired.h"
#include "ort/external/imported_memory.h"
#include "ort/external/imported_semaphore.h"

typedef struct importer {
  OrtExternalResourceImporterImpl ort; /* first member: ORT's view */
  ocp_device *device;
  const OrtEpDevice *ep_device;
} importer;

static const importer *self_of(const OrtExternalResourceImporterImpl *this_ptr) {
  return (const importer *)(const void *)this_ptr;
}

/* Returns the importer's device, after releasing resources of earlier imports whose work has finished. */
static ocp_device *device_of(const OrtExternalResourceImporterImpl *this_ptr) {
  ocp_device *device = self_of(this_ptr)->device;
  ocp_release_retired(device);
  return device;
}

static bool can_import_memory(const OrtExternalResourceImporterImpl *this_ptr, OrtExternalMemoryHandleType type) {
  (void)this_ptr;
  return type == ORT_EXTERNAL_MEMORY_HANDLE_TYPE_VK_MEMORY_OPAQUE_FD;
}

static OrtStatus *import_memory(OrtExternalResourceImporterImpl *this_ptr, const OrtExternalMemoryDescriptor *desc,
                                OrtExternalMemoryHandle **out) {
  ocp_error error = {0};
  *out = NULL;
  ocp_import_memory(device_of(this_ptr), self_of(this_ptr)->ep_device, desc, out, &error);
  return ocp_status(&error);
}

/* ORT calls the handle's own Release instead. */
static void release_memory(OrtExternalResourceImporterImpl *this_ptr, OrtExternalMemoryHandle *handle) {
  (void)this_ptr;
  if (handle)
    ocp_release_imported_memory(handle);
}

static OrtStatus *create_tensor(OrtExternalResourceImporterImpl *this_ptr, const OrtExternalMemoryHandle *handle,
                                const OrtExternalTensorDescriptor *desc, OrtValue **out) {
  ocp_error error = {0};
  *out = NULL;
  ocp_make_external_tensor(device_of(this_ptr), handle, desc, out, &error);
  return ocp_status(&error);
}

static bool can_import_semaphore(const OrtExternalResourceImporterImpl *this_ptr, OrtExternalSemaphoreType type) {
  return type == ORT_EXTERNAL_SEMAPHORE_VK_TIMELINE_SEMAPHORE_OPAQUE_FD &&
         ocp_can_import_semaphores(self_of(this_ptr)->device);
}

static OrtStatus *import_semaphore(OrtExternalResourceImporterImpl *this_ptr,
                                   const OrtExternalSemaphoreDescriptor *desc, OrtExternalSemaphoreHandle **out) {
  ocp_error error = {0};
  *out = NULL;
  ocp_import_semaphore(device_of(this_ptr), self_of(this_ptr)->ep_device, desc, out, &error);
  return ocp_status(&error);
}

static void release_semaphore(OrtExternalResourceImporterImpl *this_ptr, OrtExternalSemaphoreHandle *handle) {
  (void)this_ptr;
  if (handle)
    ocp_release_imported_semaphore(handle);
}

static OrtStatus *wait_semaphore(OrtExternalResourceImporterImpl *this_ptr, OrtExternalSemaphoreHandle *handle,
                                 OrtSyncStream *stream, uint64_t value) {
  ocp_error error = {0};
  ocp_wait_for_semaphore(self_of(this_ptr)->device, handle, stream, value, &error);
  return ocp_status(&error);
}

static OrtStatus *signal_semaphore(OrtExternalResourceImporterImpl *this_ptr, OrtExternalSemaphoreHandle *handle,
                                   OrtSyncStream *stream, uint64_t value) {
  ocp_error error = {0};
  ocp_signal_semaphore(self_of(this_ptr)->device, handle, stream, value, &error);
  return ocp_status(&error);
}

/* Handles and tensors outlive the importer. */
static void release(OrtExternalResourceImporterImpl *this_ptr) {
  device_of(this_ptr);
  free(this_ptr);
}

int ocp_ort_create_importer(ocp_device *device, const OrtEpDevice *ep_device, OrtExternalResourceImporterImpl **out,
                            ocp_error *error) {
  importer *made = calloc(1, sizeof *made);
  if (!made)
    return ocp_fail_memory(error);
  made->device = device;
  made->ep_device = ep_device;
  made->ort = (OrtExternalResourceImporterImpl){.ort_version_supported = ocp_api_version,
                                                .CanImportMemory = can_import_memory,
                                                .ImportMemory = import_memory,
                                                .ReleaseMemory = release_memory,
                                                .CreateTensorFromMemory = create_tensor,
                                                .CanImportSemaphore = can_import_semaphore,
                                                .ImportSemaphore = import_semaphore,
                                                .ReleaseSemaphore = release_semaphore,
                                                .WaitSemaphore = wait_semaphore,
                                                .SignalSemaphore = signal_semaphore,
                                                .Release = release};
  *out = &made->ort;
  return ORT_OK;
}
