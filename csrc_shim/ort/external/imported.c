#include "ort/external/imported.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/host.h"

/* Minimum number of released handles that ocp_imported_make leaves unused. A second release of such a handle is
 * noticed; that of a handle in use again would release another resource. */
enum { LEAST_FREE = 64 };

static const void *handle_of(const ocp_imported *imported) { return (const char *)imported - imported->kind->offset; }

ocp_imported *ocp_imported_make(ocp_imported_kind *kind, ocp_device *device, ocp_error *error) {
  pthread_mutex_lock(&kind->lock);
  ocp_imported *made = kind->num_free > LEAST_FREE ? kind->oldest_free : NULL;
  if (made) {
    ocp_imported *next = made->next;
    kind->oldest_free = made->next_free;
    kind->num_free--;
    memset(made, 0, kind->bytes - kind->offset);
    made->next = next;
  } else {
    char *handle = calloc(1, kind->bytes);
    if (handle) {
      made = (ocp_imported *)(void *)(handle + kind->offset);
      made->next = kind->all;
      kind->all = made;
    }
  }
  if (made) {
    made->kind = kind;
    made->device = device;
  }
  pthread_mutex_unlock(&kind->lock);
  if (!made)
    ocp_fail_memory(error);
  return made;
}

void ocp_imported_hold(ocp_imported *imported) {
  pthread_mutex_lock(&imported->kind->lock);
  imported->held = true;
  imported->users = 1;
  pthread_mutex_unlock(&imported->kind->lock);
}

void ocp_imported_discard(ocp_imported *imported) {
  ocp_imported_kind *kind = imported->kind;
  pthread_mutex_lock(&kind->lock);
  imported->next_free = NULL;
  if (kind->num_free++ > 0)
    kind->newest_free->next_free = imported;
  else
    kind->oldest_free = imported;
  kind->newest_free = imported;
  pthread_mutex_unlock(&kind->lock);
}

/* Returns the resource that the application holds by this handle; NULL: there is none. The caller holds the lock. */
static ocp_imported *find(const ocp_imported_kind *kind, const void *handle) {
  ocp_imported *imported = kind->all;
  while (imported && handle_of(imported) != handle)
    imported = imported->next;
  return imported && imported->held ? imported : NULL;
}

static const char *sort_of(const ocp_device *device) { return device->emulated ? "emulated device" : "CUDA device"; }

ocp_imported *ocp_imported_use(ocp_imported_kind *kind, const void *handle, const ocp_device *device,
                               ocp_error *error) {
  pthread_mutex_lock(&kind->lock);
  ocp_imported *found = find(kind, handle);
  const ocp_device *owner = found ? found->device : NULL;
  if (owner == device)
    found->users++;
  pthread_mutex_unlock(&kind->lock);
  if (owner == device)
    return found;
  if (!owner)
    ocp_fail(error, ORT_INVALID_ARGUMENT,
             "%s: %p is not a handle of " OCP_EP_NAME ", or it was released. Release a handle after its last use",
             kind->name, handle);
  else
    ocp_fail(error, ORT_INVALID_ARGUMENT,
             "%s: the handle belongs to %s %d, and the importer to %s %d. Import the resource with this importer",
             kind->name, sort_of(owner), owner->ordinal, sort_of(device), device->ordinal);
  return NULL;
}

static void release_retired(ocp_retired *retired) {
  ocp_imported *imported = (ocp_imported *)(void *)((char *)retired - offsetof(ocp_imported, retired));
  imported->kind->destroy(imported);
  ocp_imported_discard(imported);
}

void ocp_imported_end_use(ocp_imported *imported) {
  pthread_mutex_lock(&imported->kind->lock);
  const bool is_last = --imported->users == 0;
  pthread_mutex_unlock(&imported->kind->lock);
  if (is_last)
    ocp_retire(imported->device, &imported->retired, release_retired);
}

void ocp_imported_release(ocp_imported_kind *kind, const void *handle) {
  pthread_mutex_lock(&kind->lock);
  ocp_imported *found = find(kind, handle);
  if (found)
    found->held = false;
  pthread_mutex_unlock(&kind->lock);
  if (found) {
    ocp_imported_end_use(found);
    return;
  }
  char text[200];
  snprintf(text, sizeof text, "%s: the handle %p was released before. Release each handle once", kind->name, handle);
  ocp_log(ORT_LOGGING_LEVEL_ERROR, text, OCP_EP_NAME);
}
