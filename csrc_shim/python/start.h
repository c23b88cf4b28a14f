/* Finds and starts the Python interpreter. */
#ifndef OCP_PYTHON_START_H
#define OCP_PYTHON_START_H

#include <stdbool.h>

#include "base/error.h"
#include "python/tables.h"

/* The first tells whether Python has registered its table (ocp_set_python); the second records that it has. */
bool ocp_python_is_ready(void);
void ocp_python_set_ready(void);
/* Prepares ocp_python_call, and passes the table to Python. Starts the Python of the environment that the library is
 * installed in. If this process has a Python already, the first call loads the package instead, since that waits for
 * the GIL and the caller may hold locks of ORT (tables.h). Idempotent, thread safe. */
int ocp_python_prepare(const ocp_core *core, ocp_error *error);
/* Loads the package, for ocp_python_call. Fails before ocp_python_prepare. */
int ocp_python_load(ocp_error *error);

#endif
