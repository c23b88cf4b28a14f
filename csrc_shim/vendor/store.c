#include "vendor/store.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CAPACITY = 8 << 20, IDENTITY = 6144 };

static ocp_plan_store store;
static atomic_bool is_used;

void ocp_store_use(const ocp_plan_store *used) {
  if (atomic_load(&is_used))
    return; /* the store is set once */
  store = *used;
  atomic_store(&is_used, true);
}

bool ocp_store_key(const ocp_library *library, const ocp_problem_spec *spec, const ocp_library_handle *handle,
                   const int64_t *key, uint32_t words, bool measured, char text[OCP_STORE_KEY]) {
  char identity[IDENTITY];
  if (!atomic_load(&is_used) || !library->identify || !library->identify(handle, identity, sizeof identity))
    return false;
  const uint32_t flags = spec->flags & ~(uint32_t)OCP_PROBLEM_MEASURED;
  int length = snprintf(text, OCP_STORE_KEY, "%s %s; %u %u %u %u %d", library->name, identity, spec->kind, spec->dtype,
                        flags, spec->rank, measured);
  for (uint32_t i = 0; i < words && length > 0 && length < OCP_STORE_KEY; i++)
    length += snprintf(text + length, (size_t)(OCP_STORE_KEY - length), " %lld", (long long)key[i]);
  return length > 0 && length < OCP_STORE_KEY;
}

void *ocp_store_find(const ocp_library *library, const ocp_problem_spec *spec, const ocp_library_handle *handle,
                     const int64_t *key, const char *text) {
  char *data = malloc(CAPACITY);
  const uint64_t bytes = data ? store.load(text, data, CAPACITY) : 0;
  void *algorithm = bytes && bytes <= CAPACITY ? library->load(spec, handle, key, data, bytes) : NULL;
  free(data);
  return algorithm;
}

void ocp_store_keep(const ocp_library *library, const void *algorithm, const char *text) {
  uint64_t bytes = 0;
  char *data = library->save(algorithm, &bytes);
  if (data)
    store.keep(text, data, bytes);
  free(data);
}
