/* Runs whose work the application records into a CUDA graph of its own: it captures the stream that it gave to the
 * session (the option user_compute_stream), and runs the session meanwhile.
 *
 * During such a Run, the stream counts as capturing: operations that a graph cannot repeat, such as reading a value on
 * the host, are errors. The Run makes no call that the capture forbids. The memory that it uses and frees belongs to
 * the recording until the session ends, since launches of the application's graph use it. */
#ifndef OCP_ORT_DATA_RECORDING_H
#define OCP_ORT_DATA_RECORDING_H

#include "base/error.h"
#include "device/device.h"
#include "device/stream.h"

/* The recorded Runs of one session. */
typedef struct ocp_recordings ocp_recordings;

/* `stream`: the application's, on which all Runs of the session execute. Returns NULL if out of memory. */
ocp_recordings *ocp_recordings_create(ocp_stream *stream);
/* Returns the memory of all recorded Runs to the arena; the application must have destroyed its graphs. Ignores
 * NULL. */
void ocp_recordings_destroy(ocp_recordings *recordings);
/* Called at the start of each Run: begins a recording if the application captures the stream. */
int ocp_recordings_run_start(ocp_recordings *recordings, ocp_error *error);
/* Called at the end of each Run, on the same thread. */
void ocp_recordings_run_end(ocp_recordings *recordings);

#endif
