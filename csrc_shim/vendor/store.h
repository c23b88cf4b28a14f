/* Persistent cache of the vendor libraries' algorithms, so that cuDNN compiles an engine once, not in each process.
 *
 * Python stores the entries next to the kernel cache, under the same rules: only files that this user or root wrote are
 * loaded. The key is a text of all that determines an algorithm: library version, device, problem, sizes, alignments.
 */
#ifndef OCP_VENDOR_STORE_H
#define OCP_VENDOR_STORE_H

#include <stdbool.h>
#include <stdint.h>

#include "vendor/library.h"

enum { OCP_STORE_KEY = 8192 };

typedef struct ocp_plan_store {
  /* Copies the entry of the key into data, and returns its size in bytes; 0 if there is no entry, or if it exceeds the
   * capacity. */
  uint64_t (*load)(const char *key, char *data, uint64_t capacity);
  void (*keep)(const char *key, const char *data, uint64_t bytes);
} ocp_plan_store;

/* Sets the store; until then nothing is loaded or stored. */
void ocp_store_use(const ocp_plan_store *store);
/* Makes the key; false if the library's algorithms are not stored. `measured`: whether the algorithm is the fastest of
 * several. */
bool ocp_store_key(const ocp_library *library, const ocp_problem_spec *spec, const ocp_library_handle *handle,
                   const int64_t *key, uint32_t words, bool measured, char text[OCP_STORE_KEY]);
/* Loads the algorithm of a key; NULL if the store has no algorithm that the library accepts. */
void *ocp_store_find(const ocp_library *library, const ocp_problem_spec *spec, const ocp_library_handle *handle,
                     const int64_t *key, const char *text);
void ocp_store_keep(const ocp_library *library, const void *algorithm, const char *text);

#endif
