#include "vendor/substitute.h"

#include <stdatomic.h>

#include "base/counters.h"

static ocp_substitutes substitutes;
static atomic_bool are_used;

void ocp_substitutes_use(const ocp_substitutes *functions) {
  if (atomic_load(&are_used))
    return; /* the functions are set once */
  substitutes = *functions;
  atomic_store(&are_used, true);
}

const void *ocp_substitute_make(ocp_device *device, const ocp_refused_call *call, bool lasts, ocp_error *error) {
  const ocp_error refusal = *error;
  if (!atomic_load(&are_used))
    return NULL;
  ocp_count(OCP_LIBRARY_REFUSALS, 1);
  error->code = ORT_OK;
  const void *made = substitutes.make(device, call, refusal.text, lasts, error);
  if (!made) {
    const ocp_error reason = *error;
    ocp_fail(error, refusal.code, "%.400s. No kernel of the plugin can replace the call: %.450s", refusal.text,
             reason.text);
  }
  return made;
}

int ocp_substitute_run(const void *substitute, ocp_stream *stream, const ocp_refused_call *call, ocp_error *error) {
  error->code = ORT_OK;
  return substitutes.run(substitute, stream, call, error);
}
