/* What devices did, and when: recorded while somebody listens.
 *
 * A listener is a profile that ONNX Runtime makes: of a session, or of one Run. ORT says on each thread which event of
 * the profile begins and ends. Work that the thread enqueues meanwhile is that event's, and every listener whose event
 * the thread is in gets it. Beside that, the code that enqueues says what the work is: its source, a number whose
 * meaning the room above knows.
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

/* The calling thread, as ORT numbers threads; 0 outside of events. */
int32_t ocp_activity_thread(void);

/* ---- events ---- */

/* The calling thread is in an event that it knows by this key, and in it no more; events nest. Two threads may use one
 * key at once: `event` is the number of the event among all, and 0 where the thread is in none of this key. `since` is
 * when it entered. */
void ocp_listener_enter(ocp_listener *listener, uint64_t key);
typedef struct ocp_left_event {
  uint64_t event;
  int64_t since;
} ocp_left_event;
ocp_left_event ocp_listener_leave(const ocp_listener *listener, uint64_t key);

/* ---- work ---- */

void ocp_graph_sources_clear(ocp_graph_sources *sources);
/* Notes what the calling thread names from now on, until the end, which moves it there; NULL: it is forgotten. */
void ocp_activity_begin_graph(void);
void ocp_activity_end_graph(ocp_graph_sources *into);
/* As ocp_activity_of, for the launch of a graph. */
void ocp_activity_of_graph(ocp_graph_sources *sources);

/* What the calling thread enqueues from now on is of this source; 0: of none. */
void ocp_activity_of(uint64_t source);
uint64_t ocp_activity_source(void);
/* For whom the calling thread's work is; false: for nobody. */
bool ocp_activity_owned(ocp_activity_owners *owners);

#endif
