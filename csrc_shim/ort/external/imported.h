/* Imported resources: the common part of imported memory and imported semaphores. The application holds a resource by a
 * handle, a struct that ONNX Runtime reads; tensors and calls in progress use it as well.
 *
 *            the application releases the handle          the last user ends       its work has finished
 *   held ------------------------------------------> used ---------------> retired --------------> free -> held, ...
 *     (if nothing uses the resource: straight to retired)
 *
 * ONNX Runtime calls the release function that it finds in the handle, so the memory of a handle is never freed, but
 * used again. Thus a second release of a handle is an error instead of an access to freed memory. */
#ifndef OCP_ORT_EXTERNAL_IMPORTED_H
#define OCP_ORT_EXTERNAL_IMPORTED_H

#include <pthread.h>

#include "device/device.h"
#include "device/retired.h"

typedef struct ocp_imported_kind ocp_imported_kind;
typedef struct ocp_imported {
  ocp_imported_kind *kind;
  struct ocp_imported *next;      /* in the list of all */
  struct ocp_imported *next_free; /* in the list of free ones */
  ocp_device *device;
  uint32_t users; /* the handle, if the application holds it; tensors; calls in progress */
  bool held;      /* the application has not released the handle */
  ocp_retired retired;
} ocp_imported;

/* The resources of one kind. */
struct ocp_imported_kind {
  const char *name;     /* for messages: "external memory" */
  size_t bytes, offset; /* size of a resource's struct, which begins with the handle; offset of its ocp_imported */
  void (*destroy)(ocp_imported *imported); /* called when no work uses the resource any more; the device is entered */
  pthread_mutex_t lock;                    /* guards the members below, and `users` and `held` of the resources */
  ocp_imported *all;
  ocp_imported *oldest_free, *newest_free;
  uint32_t num_free;
};

/* Returns a resource without users, whose members from its ocp_imported on are zero; NULL with the error if out of
 * memory. */
ocp_imported *ocp_imported_make(ocp_imported_kind *kind, ocp_device *device, ocp_error *error);
/* After the import: makes the application hold the resource; or, if the import failed, frees the resource. */
void ocp_imported_hold(ocp_imported *imported);
void ocp_imported_discard(ocp_imported *imported);
/* Returns the resource that the application holds by this handle, with one more user. NULL with the error if there is
 * none, or if it belongs to another device than `device`. */
ocp_imported *ocp_imported_use(ocp_imported_kind *kind, const void *handle, const ocp_device *device, ocp_error *error);
/* Ends a use. The last one retires the resource. */
void ocp_imported_end_use(ocp_imported *imported);
/* Releases the application's handle; logs an error if the application does not hold it. */
void ocp_imported_release(ocp_imported_kind *kind, const void *handle);

#endif
