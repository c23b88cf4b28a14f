/* Profiling: attributes the work that devices run to the profile events and ONNX nodes that enqueued it.
 *
 * A listener collects the activities (kernels, copies, memsets) of one ONNX Runtime profile: a session's, or a Run's.
 * On each thread, ORT reports when an event of the profile begins and ends. Work that the thread enqueues in between
 * belongs to that event, and every listener with an open event on the thread receives the work as an activity. The code
 * that enqueues the work also sets its source, a number that run/instance/sources.h resolves to ONNX nodes.
 *
 *     StartEvent -> enter --+                              +-> driver: runs the work, now or later -> deliver
 *                           +-> owners and source of a call-+
 *     run/: ocp_activity_of +
 *
 * Times are nanoseconds of CLOCK_MONOTONIC. */
#ifndef OCP_DRIVER_ACTIVITY_H
#define OCP_DRIVER_ACTIVITY_H

#include <stdbool.h>
#include <stdint.h>

#include "driver/listener.h"
#include "driver/tracer.h"

/* Returns the calling thread's id in ORT's profile (gettid); 0 if the thread has neither entered a profile event nor
 * set a source. */
int32_t ocp_activity_thread(void);

/* ---- events ---- */

/* Begin and end a profile event on the calling thread. ORT chooses `key`; several threads may use one key at once, and
 * events nest. ocp_listener_leave returns the event's start (`since`) and its process-wide number (`event`; 0: the
 * thread has no open event with this key). */
void ocp_listener_enter(ocp_listener *listener, uint64_t key);
typedef struct ocp_left_event {
  uint64_t event;
  int64_t since;
} ocp_left_event;
ocp_left_event ocp_listener_leave(const ocp_listener *listener, uint64_t key);

/* ---- work ---- */

void ocp_graph_sources_clear(ocp_graph_sources *sources);
/* Begin and end a recording of the sources that the calling thread sets while it builds or captures a CUDA graph, one
 * source for each node. ocp_activity_end_graph moves the sources to `into` (NULL: drops them). */
void ocp_activity_begin_graph(void);
void ocp_activity_end_graph(ocp_graph_sources *into);
/* Attributes the calling thread's next graph launch to the sources of the graph's nodes, until the next
 * ocp_activity_of. */
void ocp_activity_of_graph(ocp_graph_sources *sources);

/* Sets the source of the work that the calling thread enqueues from now on; 0: no source. */
void ocp_activity_of(uint64_t source);
/* Sets the source of the graph nodes that the calling thread adds or updates from now on; 0: no source. Unlike
 * ocp_activity_of, it gives the tracer no correlation id, because adding or updating a node enqueues no work that a
 * record of CUPTI could describe. */
void ocp_activity_of_node(uint64_t source);
uint64_t ocp_activity_source(void);
/* Finds the profile events that own the calling thread's work; false: there are none. */
bool ocp_activity_owned(ocp_activity_owners *owners);

#endif
