/* The handle that a stream has of a vendor library.
 *
 * Threads that share a stream share its handle, and NVIDIA forbids that two of them use one at a time: a call holds the
 * handle from its first use to its last. The stream's slot keeps it, so that it is closed with the stream. */
#ifndef OCP_VENDOR_HANDLE_H
#define OCP_VENDOR_HANDLE_H

#include <pthread.h>

#include "base/error.h"
#include "device/stream.h"

struct ocp_library;

typedef struct ocp_library_handle {
  const struct ocp_library *library;
  void *handle;
  int ordinal; /* of the stream's device */
  pthread_mutex_t lock;
  bool executed; /* a call, outside of captures: what the library allocates at first is there. Under the lock. */
} ocp_library_handle;

/* The stream's handle, locked; opens it where there is none. NULL with the error. */
ocp_library_handle *ocp_library_handle_take(ocp_stream *stream, const struct ocp_library *library, ocp_error *error);
void ocp_library_handle_give_back(ocp_library_handle *handle);

#endif
