/* OrtExternalResourceImporterImpl: imports memory and timeline semaphores of other APIs, such as Vulkan, by POSIX file
 * descriptors. */
#ifndef OCP_ORT_EXTERNAL_IMPORTER_H
#define OCP_ORT_EXTERNAL_IMPORTER_H

#include "base/error.h"
#include "device/device.h"

/* Makes an importer for the device. ORT's OrtEpDevice goes into the handles. */
int ocp_ort_create_importer(ocp_device *device, const OrtEpDevice *ep_device, OrtExternalResourceImporterImpl **out,
                            ocp_error *error);

#endif
