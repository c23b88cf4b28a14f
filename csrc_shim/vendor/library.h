/* The interface of a vendor library to problem.c: its symbols, and functions that choose, run, save and load
 * algorithms. Types only. */
#ifndef OCP_VENDOR_LIBRARY_H
#define OCP_VENDOR_LIBRARY_H

#include <pthread.h>

#include "base/error.h"
#include "device/stream_state.h"
#include "driver/driver.h"
#include "vendor/prepared.h"
#include "vendor/spec.h"

/* A stream's handle of a library (handle.h). */
typedef struct ocp_library_handle {
  const struct ocp_library *library;
  void *handle;
  int ordinal; /* of the stream's device */
  pthread_mutex_t lock;
  bool executed; /* a call has executed outside of captures: the library's initial allocations are done. Under the lock.
                  */
} ocp_library_handle;

/* One vendor library. ocp_library_load fills its table of functions from `symbols`, in order. */
typedef struct ocp_library {
  const char *name;
  ocp_stream_slot_id slot; /* slot of a stream for its handle */
  const char *const *symbols;
  void **functions;
  uint32_t num_symbols;
  uint32_t num_pointers, num_values; /* of a call without bias and residual; num_values is for rank 0 */
  uint32_t values_per_dimension;
  bool is_for_device; /* prepare needs only the handle's device, and takes long: several threads prepare */
  bool one_thread;    /* an algorithm, like a handle, is for one thread at a time */
  /* Whether the library can be used, once it is loaded; NULL: always. */
  int (*check)(ocp_error *error);
  /* Whether problems of these sizes are valid. */
  bool (*valid)(const ocp_problem_spec *spec, const int64_t *values);
  int (*open)(void **handle, ocp_error *error);
  void (*close)(void *handle);
  /* Adds the numbers besides the values that decide the algorithm, such as alignments; returns their count. */
  uint32_t (*extend_key)(const ocp_problem_spec *spec, void *const *pointers, int64_t *key);
  /* Makes the algorithm at that rank of the library's order, 0 for its best; NULL if there are fewer, or if there is
   * nothing to compute. */
  int (*prepare)(const ocp_problem_spec *spec, const ocp_library_handle *handle, const int64_t *key, uint32_t rank,
                 void **algorithm, ocp_error *error);
  void (*release)(void *algorithm);
  /* For the store (store.h); all NULL if nothing is stored. identify: the version and the device as text; false if
   * unknown. save: an algorithm as text, to be freed, or NULL. load: the saved algorithm, or NULL. */
  bool (*identify)(const ocp_library_handle *handle, char *text, uint64_t bytes);
  char *(*save)(const void *algorithm, uint64_t *bytes);
  void *(*load)(const ocp_problem_spec *spec, const ocp_library_handle *handle, const int64_t *key, const char *data,
                uint64_t bytes);
  int (*run)(const ocp_problem_spec *spec, void *handle, const ocp_prepared *prepared, CUstream stream,
             void *const *pointers, ocp_error *error);
} ocp_library;

#endif
