/* The file descriptors that the application gives for imports. */
#ifndef OCP_ORT_EXTERNAL_DESCRIPTOR_H
#define OCP_ORT_EXTERNAL_DESCRIPTOR_H

#include "base/error.h"

/* Duplicates the descriptor in `native_handle`; `what` names the imported resource in errors. A driver owns what it has
 * imported. With a duplicate, the application still owns its descriptor if a later step of the import fails. */
int ocp_duplicate_descriptor(const void *native_handle, const char *what, int *fd, ocp_error *error);
/* Closes the application's descriptor, after the import has succeeded. */
void ocp_close_descriptor(const void *native_handle);

/* Fails unless the application has set a descriptor's member `version` to a version that has external resources. */
int ocp_check_descriptor_version(uint32_t version, const char *what, ocp_error *error);

#endif
