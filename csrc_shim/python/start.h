/* Finds and starts the Python interpreter. */
#ifndef OCP_PYTHON_START_H
#define OCP_PYTHON_START_H

#include <stdbool.h>

#include "base/error.h"
#include "python/tables.h"

/* ocp_python_is_ready: whether Python has registered its table (ocp_set_python). ocp_python_set_ready records that it
 * has. */
bool ocp_python_is_ready(void);
void ocp_python_set_ready(void);
/* Prepares ocp_python_call: starts the Python of the environment in which the library is installed, else the one that
 * ORT_CUDA_PLUGIN_PYTHON names, and passes `core` to it. If the process has a Python, the first ocp_python_call loads
 * the package instead, since loading waits for the GIL and the caller may hold locks of ORT (tables.h). Idempotent,
 * thread safe. */
int ocp_python_prepare(const ocp_core *core, ocp_error *error);
/* Loads the package, for ocp_python_call. Fails before ocp_python_prepare. */
int ocp_python_load(ocp_error *error);

#endif
