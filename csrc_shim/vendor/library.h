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
  const ocp_driver *driver; /* of the stream's device */
  int ordinal;              /* ordinal of the stream's device */
  pthread_mutex_t lock;
  bool executed; /* a call has executed outside of captures, so the library has made its initial allocations; guarded by
                    the lock */
} ocp_library_handle;

/* Layout of a call's result in memory: `groups` of `rows` of `columns` contiguous elements. Strides are in elements. */
typedef struct ocp_result {
  int64_t groups, group_stride, rows, row_stride, columns;
} ocp_result;

/* One vendor library. Its functions fail with ORT_RUNTIME_EXCEPTION if the library would refuse the same call in
 * another process as well, and with another code if, for example, memory ran out. ocp_library_load fills its table of
 * functions from `symbols`, in order. */
typedef struct ocp_library {
  const char *name;
  ocp_stream_slot_id slot; /* the slot of streams that has the library's handle */
  const char *const *symbols;
  void **functions;
  uint32_t num_symbols;
  uint32_t num_pointers, num_values; /* counts of a call of rank 0, without bias and residual */
  uint32_t values_per_dimension;
  bool is_for_device; /* `prepare` uses only the handle's device, and is slow: several threads call it ahead of time */
  bool one_thread;    /* one thread at a time may use an algorithm */
  /* Returns the version of the loaded library: 10000 * major + 100 * minor + patch. */
  size_t (*version)(void);
  /* Fails if the plugin cannot use the loaded library, for example an old version; NULL: it can use every version. */
  int (*check)(ocp_error *error);
  /* Whether the sizes in `values` are valid for the problem. */
  bool (*valid)(const ocp_problem_spec *spec, const int64_t *values);
  int (*open)(void **handle, ocp_error *error);
  void (*close)(void *handle);
  /* Writes to `key` the numbers that decide the algorithm in addition to the call's values, such as alignments; returns
   * their count. */
  uint32_t (*extend_key)(const ocp_problem_spec *spec, void *const *pointers, int64_t *key);
  /* Makes the algorithm with this rank in the library's order (0: the best). *algorithm stays NULL if there is nothing
   * to compute, or if there are fewer algorithms; for rank 0 the latter is an error. */
  int (*prepare)(const ocp_problem_spec *spec, const ocp_library_handle *handle, const int64_t *key, uint32_t rank,
                 void **algorithm, ocp_error *error);
  void (*release)(void *algorithm);
  /* Describes the result of calls with this key; NULL if algorithms are not measured. */
  ocp_result (*result)(const ocp_problem_spec *spec, const int64_t *key);
  /* For the store (store.h); all NULL if the library's algorithms are not stored. identify: writes the version and the
   * device as text; false if unknown. save: returns an algorithm as text, which the caller frees; NULL: the library
   * cannot write it. load: makes the algorithm of such a text; NULL: the library does not accept it. */
  bool (*identify)(const ocp_library_handle *handle, char *text, uint64_t bytes);
  char *(*save)(const void *algorithm, uint64_t *bytes);
  void *(*load)(const ocp_problem_spec *spec, const ocp_library_handle *handle, const int64_t *key, const char *data,
                uint64_t bytes);
  int (*run)(const ocp_problem_spec *spec, const ocp_library_handle *handle, const ocp_prepared *prepared,
             CUstream stream, void *const *pointers, ocp_error *error);
} ocp_library;

#endif
