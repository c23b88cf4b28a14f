/* Finding and starting Python. */
#ifndef OCP_PYTHON_START_H
#define OCP_PYTHON_START_H

#include "base/error.h"
#include "python/tables.h"

/* Makes ocp_python_call work: uses the Python of this process, or starts the one of the environment that the library is
 * installed in. Python gets the table. Idempotent, thread safe. */
int ocp_python_start(const ocp_core *core, ocp_error *error);

#endif
