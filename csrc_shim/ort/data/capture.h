/* ONNX Runtime's capture of whole Runs (the option enable_cuda_graph): the state of one OrtEp.
 *
 * Each thread that runs the session has its own stream, and graphs by annotation id. After some warm Runs a Run is
 * captured between OnRunStart and OnRunEnd; from then on ORT asks for a replay instead of running. Memory that a
 * captured Run frees is kept with its graph: replays use it again.
 *
 * What one thread has of one annotation id:
 *
 *        +------+   the last of the warm Runs   +------+   Run starts, a turn alone   +-----------+
 *     +->| cold | ----------------------------> | warm | ---------------------------> | capturing |
 *     |  +------+ <-+                           +------+                              +-----------+
 *     |   |  |      |  the Run fails, lacks a computation, or never ends               |  | Run ends: instantiate,
 *     +---+  |      +------------------------------------------------------------------+  v launch
 *     a warm |                                                                        +----------+
 *     Run    |   released, or the thread or the EP ends                               | captured | <-+
 *            +------> gone <--------------------------------------------------------- +----------+ --+ replay
 *
 * The last warm Run is watched (device/run_memory.h), so that the captured one finds the memory that it needs. ONNX
 * Runtime repeats a Run until it is captured: a warm Run leaves what it has read as it was (device/memory/preserve.h).
 *
 * Invariants:
 * - A capture has the stream alone from OnRunStart to OnRunEnd, since it takes in whatever is enqueued there. Other
 *   Runs and replays share it.
 * - Memory noted in an entry is watched by at most one thread, and only between the start and the end of a Run.
 * - The memory of a graph goes back only after the graph: with the entry that has both.
 * - A Run that ORT never ends is abandoned when its thread runs again, or when the thread or the EP ends.
 * - Locks are taken in this order: links, a thread's lock, those of memory. No turn is waited for under any of them. */
#ifndef OCP_ORT_DATA_CAPTURE_H
#define OCP_ORT_DATA_CAPTURE_H

#include "base/error.h"
#include "device/device.h"
#include "device/stream.h"

#define OCP_NO_CAPTURE (-1) /* the annotation id of Runs that are never captured */

typedef struct ocp_capture ocp_capture;
typedef struct ocp_capture_thread ocp_capture_thread;

/* For Runs on the stream, which one thread at a time may then capture; if `stream` is NULL, for Runs on a stream for
 * each thread. NULL: out of memory. */
ocp_capture *ocp_capture_create(ocp_device *device, ocp_stream *stream, uint32_t warm_runs);
/* Destroys all graphs; no Run may be active. NULL is ignored. */
void ocp_capture_destroy(ocp_capture *capture);

/* The stream that the calling thread runs the session on, with a reference for the caller. */
int ocp_capture_stream(ocp_capture *capture, ocp_stream **stream, ocp_error *error);
/* Called at the start of every Run of every EP: the previous Run on this thread is over, even if ORT has not ended it.
 */
void ocp_capture_forget_run(void);
/* Around a Run with that annotation id, on the thread that runs it. The end of a captured Run launches its graph. */
int ocp_capture_run_start(ocp_capture *capture, int id, ocp_error *error);
int ocp_capture_run_end(ocp_capture *capture, int id, bool synchronize, ocp_error *error);
/* Whether the calling thread has the graph; launches it and waits. */
bool ocp_capture_has(ocp_capture *capture, int id);
int ocp_capture_replay(ocp_capture *capture, int id, ocp_error *error);
/* Releases what every thread has of the id: its graph and the memory that it keeps. Safe beside Runs; one that is being
 * captured goes on, and a thread that runs again starts with warm Runs. */
void ocp_capture_release(ocp_capture *capture, int id);

/* ---- for code that enqueues ---- */
/* Notes a computation on the stream: a captured Run that lacks one, or in which one failed, gives no graph. */
void ocp_capture_computed(ocp_stream *stream, bool succeeded);

#endif
