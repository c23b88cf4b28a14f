/* A stream's handle of a vendor library (cublasLtHandle_t, cudnnHandle_t).
 *
 * Threads that share a stream share its handle. The libraries allow one thread at a time to use a handle, so a call
 * locks the handle from its first use to its last. The stream owns the handle, and closes it. */
#ifndef OCP_VENDOR_HANDLE_H
#define OCP_VENDOR_HANDLE_H

#include "base/error.h"
#include "device/stream.h"
#include "vendor/library.h"

/* Locks the stream's handle, which is opened on first use, and returns it; NULL with the error. */
ocp_library_handle *ocp_library_handle_take(ocp_stream *stream, const ocp_library *library, ocp_error *error);
void ocp_library_handle_give_back(ocp_library_handle *handle);

#endif
