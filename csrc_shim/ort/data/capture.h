/* Capture of whole Runs into CUDA graphs, for the option enable_cuda_graph. An ocp_capture is the state of one OrtEp.
 *
 * Each thread that runs the session has graphs by annotation id (run option gpu_graph_id), and its own stream unless
 * the session has one stream for all Runs. After some warm Runs a Run is captured between OnRunStart and OnRunEnd; from
 * then on ORT asks for a replay instead of running. Memory that a captured Run frees is kept with its graph, since
 * replays use the same memory.
 *
 * The states of one annotation id on one thread:
 *
 *        +------+   the last of the warm Runs   +------+  Run starts, exclusive turn  +-----------+
 *     +->| cold | ----------------------------> | warm | ---------------------------> | capturing |
 *     |  +------+ <-+                           +------+                              +-----------+
 *     |   |  |      |  the Run fails, lacks a cluster call, or never ends              |  | Run ends: instantiate,
 *     +---+  |      +------------------------------------------------------------------+  v launch
 *     a warm |                                                                        +----------+
 *     Run    |   released, or the thread or the EP ends                               | captured | <-+
 *            +------> gone <--------------------------------------------------------- +----------+ --+ replay
 *
 * The last warm Run's allocations are watched (device/run_memory.h), so that the captured Run needs no new memory.
 * ONNX Runtime repeats a Run until it is captured: a warm Run restores the inputs that it overwrites
 * (device/memory/preserve.h).
 *
 * Invariants:
 * - A capture holds an exclusive turn on the stream from OnRunStart to OnRunEnd, since it records everything that
 *   threads enqueue on the stream. Runs that are not captured, and replays, share the stream.
 * - The memory recorded in the state of an annotation id is watched by at most one thread, and only between the start
 *   and the end of a Run.
 * - The memory of a graph is freed after the graph, together with the state that owns both.
 * - A Run that ORT never ends is abandoned when its thread runs again, or when the thread or the EP ends.
 * - Locks are taken in this order: `links` (capture.c), a thread's lock, the locks of csrc_shim/device. No thread
 *   waits for a turn while it holds one of them. */
#ifndef OCP_ORT_DATA_CAPTURE_H
#define OCP_ORT_DATA_CAPTURE_H

#include "base/error.h"
#include "device/device.h"
#include "device/stream.h"

#define OCP_NO_CAPTURE (-1) /* the annotation id of Runs that are never captured */

typedef struct ocp_capture ocp_capture;
typedef struct ocp_capture_thread ocp_capture_thread;

/* Makes the capture state of an EP. All its Runs use `stream`, on which one thread at a time captures; if it is NULL,
 * each thread gets its own stream. Returns NULL if out of memory. */
ocp_capture *ocp_capture_create(ocp_device *device, ocp_stream *stream, uint32_t warm_runs);
/* Destroys all graphs; no Run may be active. Ignores NULL. */
void ocp_capture_destroy(ocp_capture *capture);

/* Finds the stream on which the calling thread runs the session; the caller releases the reference. */
int ocp_capture_stream(ocp_capture *capture, ocp_stream **stream, ocp_error *error);
/* Called at the start of each Run of any EP: forgets the thread's previous Run, which ORT may not have ended. */
void ocp_capture_forget_run(void);
/* Called around a Run with that annotation id, on the thread that runs it. The end of a captured Run launches its
 * graph. */
int ocp_capture_run_start(ocp_capture *capture, int id, ocp_error *error);
int ocp_capture_run_end(ocp_capture *capture, int id, bool synchronize, ocp_error *error);
/* ocp_capture_has: whether the calling thread has a graph for the id. ocp_capture_replay launches it and waits. */
bool ocp_capture_has(ocp_capture *capture, int id);
int ocp_capture_replay(ocp_capture *capture, int id, ocp_error *error);
/* Releases the threads' states for the id: graphs and the memory that they keep. Safe during Runs: a thread that is
 * capturing a Run of the id, or watching its allocations, keeps its state. On other threads the next Runs of the id are
 * warm Runs again. */
void ocp_capture_release(ocp_capture *capture, int id);

/* ---- for code that enqueues work ---- */
/* Records a call of a cluster on the stream, or (`succeeded` false) that a call or a copy failed. A captured Run gives
 * no graph if a call or copy failed, or if it has another number of calls than the warm Run before it. */
void ocp_capture_computed(ocp_stream *stream, bool succeeded);

#endif
