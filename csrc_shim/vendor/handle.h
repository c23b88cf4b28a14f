/* The handle that a stream has of a vendor library.
 *
 * Threads that share a stream share its handle, and NVIDIA forbids that two of them use one at a time: a call holds the
 * handle from its first use to its last. The stream's slot keeps it, so that it is closed with the stream. */
#ifndef OCP_VENDOR_HANDLE_H
#define OCP_VENDOR_HANDLE_H

#include "base/error.h"
#include "device/stream.h"
#include "vendor/library.h"

/* The stream's handle, locked; opens it where there is none. NULL with the error. */
ocp_library_handle *ocp_library_handle_take(ocp_stream *stream, const ocp_library *library, ocp_error *error);
void ocp_library_handle_give_back(ocp_library_handle *handle);

#endif
