/* Finds and starts the Python interpreter. */
#ifndef OCP_PYTHON_START_H
#define OCP_PYTHON_START_H

#include <stdbool.h>

#include "base/error.h"
#include "python/tables.h"

/* Whether Python has given its table (ocp_set_python); and that it has. */
bool ocp_python_is_ready(void);
void ocp_python_set_ready(void);
/* Has ocp_python_call work from now on; Python gets the table. Starts the Python of the environment that the library is
 * installed in, unless this process has one: then the first call loads the package, since that waits for the GIL and
 * the caller may have locks of ORT (tables.h). Idempotent, thread safe. */
int ocp_python_prepare(const ocp_core *core, ocp_error *error);
/* Loads the package, for ocp_python_call. Fails where nothing was prepared. */
int ocp_python_load(ocp_error *error);

#endif
