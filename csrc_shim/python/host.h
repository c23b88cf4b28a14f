/* Calls from the library into Python: the table of functions, and when they may be called.
 *
 *     +------------+  ocp_python_prepare, or   +-------+  ocp_shut_down, from   +---------------+
 *     | not loaded | ------------------------> | ready | ---------------------> | shutting down |
 *     +------------+  the first call           +-------+  Python's atexit       +---------------+
 *
 * Invariants:
 * - Every call goes through ocp_python_call, which loads the package if necessary, counts the call, and refuses it
 *   while Python shuts down and in a forked child.
 * - The call waits for the GIL, and Python may call ocp_core. So no lock of the library is held during a call, except
 *   for a Run's turn on its stream (device/stream.h), and in calls of load_plan and keep_plan for the locks of a
 *   library call that makes an algorithm (vendor/problem.c).
 * - No exception leaves Python: a member of the table reports it by its error or status. A KeyboardInterrupt becomes an
 *   error as well, and SIGINT is sent when the call has returned. */
#ifndef OCP_PYTHON_HOST_H
#define OCP_PYTHON_HOST_H

#include "base/error.h"
#include "python/tables.h"
#include "run/instance/input.h"

/* Returns the table for one call into Python, and counts the call in OCP_PYTHON_CALLS. NULL with the error when
 * Python must not be called: it cannot be loaded, is shutting down, or this process is a forked child. */
const ocp_python *ocp_python_call(ocp_error *error);
/* Must be called after each call into Python: sends SIGINT if Python has turned a KeyboardInterrupt into an error. */
void ocp_python_returned(void);
/* Calls ocp_python_returned, and converts the status that Python returned into one for ORT. */
OrtStatus *ocp_python_status(OrtStatus *status);
int ocp_set_python(const ocp_python *python, ocp_error *error);
void ocp_interrupt_after_call(void);
/* The ocp_build_fn of clusters: lets Python build a plan. `cluster`: Python's handle of the cluster. */
int ocp_python_build_variant(int64_t cluster, const ocp_input *inputs, uint32_t num_inputs, const int64_t *host_values,
                             const uint32_t *host_counts, uint32_t num_host_inputs, ocp_error *error);
/* The ocp_call_fn of clusters: runs a callback of a plan in Python. */
int ocp_python_call_back(int64_t cluster, uint32_t callback, const uint64_t *pointers, uint32_t num_pointers,
                         const int64_t *numbers, uint32_t num_numbers, ocp_stream *stream, ocp_error *error);

#endif
