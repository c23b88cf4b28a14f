/* The library's relation to Python: the table of calls into it, and when it may be used.
 *
 *     +------------+ ocp_python_prepare, or +-------+ ocp_shut_down, from +---------------+ | not loaded |
 *     ------------------------> | ready | ---------------------> | shutting down | +------------+ the first call
 *     +-------+ Python's atexit +---------------+
 *
 * Invariants:
 * - Every call goes through ocp_python_call, which counts it and refuses it in any other state and in a forked child.
 * - No lock of the library is held during a call: Python may call back through ocp_core, and waits for its GIL.
 * - No exception crosses: a member reports it by its error or status. A KeyboardInterrupt becomes an error, too,
 *   and is sent again when the call has returned. */
#ifndef OCP_PYTHON_HOST_H
#define OCP_PYTHON_HOST_H

#include "base/error.h"
#include "python/tables.h"
#include "run/instance/input.h"

/* Returns the table for one call into Python, and counts the call in OCP_PYTHON_CALLS. NULL with the error when
 * Python must not be called: it cannot be loaded, is shutting down, or this process is a forked child. */
const ocp_python *ocp_python_call(ocp_error *error);
/* Call it after each call into Python: if Python has turned an interrupt into an error, this sends the interrupt again.
 */
void ocp_python_returned(void);
/* ocp_python_returned; translates the status that Python returned into the one for ORT. */
OrtStatus *ocp_python_status(OrtStatus *status);
int ocp_set_python(const ocp_python *python, ocp_error *error);
void ocp_interrupt_after_call(void);
/* The builder of plans for clusters: calls Python with its handle of the cluster. */
int ocp_python_build_variant(int64_t cluster, const ocp_input *inputs, uint32_t num_inputs, const int64_t *host_values,
                             const uint32_t *host_counts, uint32_t num_host_inputs, ocp_error *error);
/* The target of plans' callbacks for clusters. */
int ocp_python_call_back(int64_t cluster, uint32_t callback, const uint64_t *pointers, uint32_t num_pointers,
                         const int64_t *numbers, uint32_t num_numbers, ocp_stream *stream, ocp_error *error);

#endif
