/* OrtExternalResourceImporterImpl: imports memory and timeline semaphores of other APIs, such as Vulkan, by POSIX file
 * descriptors. */
#ifndef OCP_ORT_EXTERNAL_IMPORTER_H
#define OCP_ORT_EXTERNAL_IMPORTER_H

#include "base/error.h"
#include "device/device.h"

/* Makes an importer of external memory and semaphores for the device. Each OrtExternalMemoryHandle and
 * OrtExternalSemaphoreHandle that it returns has `ep_device` as its device. */
int ocp_ort_create_importer(ocp_device *device, const OrtEpDevice *ep_device, OrtExternalResourceImporterImpl **out,
                            ocp_error *error);

#endif
