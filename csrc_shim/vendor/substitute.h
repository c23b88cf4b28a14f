/* Kernels of the plugin in place of a library call that the library refuses: no algorithm for a problem, an engine that
 * does not execute, a library without kernels for a GPU.
 *
 * For each problem and the sizes of its call, Python makes the substitute once, logs a warning, and remembers the
 * refusal, so that later plans do not call the library. Plans that exist already run the substitute without Python. */
#ifndef OCP_VENDOR_SUBSTITUTE_H
#define OCP_VENDOR_SUBSTITUTE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "device/stream.h"
#include "vendor/spec.h"

/* A call that a library has refused. */
typedef struct ocp_refused_call {
  const char *library;
  const ocp_problem_spec *spec;
  const int64_t *values;
  uint32_t num_values;
  void *const *pointers;
  uint32_t num_pointers;
} ocp_refused_call;

/* Functions that make and run substitutes. A substitute lives until the device's last cluster with library problems is
 * released. */
typedef struct ocp_substitutes {
  /* Returns the substitute; NULL with the error. `why`: the library's error. `lasts`: whether the library would
   * refuse the call in later processes as well. */
  const void *(*make)(ocp_device *device, const ocp_refused_call *call, const char *why, bool lasts, ocp_error *error);
  int (*run)(const void *substitute, ocp_stream *stream, const ocp_refused_call *call, ocp_error *error);
} ocp_substitutes;

/* Sets the functions; until then refusals are errors. */
void ocp_substitutes_use(const ocp_substitutes *functions);
/* Makes the substitute of a call. No lock may be held: this calls Python. *error holds the library's error at entry. If
 * there is no substitute, returns NULL and adds the reason to *error. */
const void *ocp_substitute_make(ocp_device *device, const ocp_refused_call *call, bool lasts, ocp_error *error);
int ocp_substitute_run(const void *substitute, ocp_stream *stream, const ocp_refused_call *call, ocp_error *error);

#endif
