/* Memory of another API, imported by its file descriptor, and tensors in it. */
#ifndef OCP_ORT_EXTERNAL_IMPORTED_MEMORY_H
#define OCP_ORT_EXTERNAL_IMPORTED_MEMORY_H

#include "base/error.h"
#include "device/device.h"

/* Imports the memory. On success the plugin owns the file descriptor; on failure it remains the caller's. */
int ocp_import_memory(ocp_device *device, const OrtEpDevice *ep_device, const OrtExternalMemoryDescriptor *desc,
                      OrtExternalMemoryHandle **out, ocp_error *error);
/* Releases the application's handle. The memory is unmapped when its tensors are released, and the work that was
 * enqueued until then has finished. */
void ocp_release_imported_memory(OrtExternalMemoryHandle *handle);
/* Makes a tensor in imported memory of the device, without a copy. The tensor keeps the memory mapped. */
int ocp_make_external_tensor(ocp_device *device, const OrtExternalMemoryHandle *handle,
                             const OrtExternalTensorDescriptor *desc, OrtValue **out, ocp_error *error);

#endif
