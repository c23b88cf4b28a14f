/* Listeners receive activities: kernels, copies and memsets that a device has run, with their times. A listener belongs
 * to one ONNX Runtime profile, of a session or of one Run (activity.h). Times are nanoseconds of CLOCK_MONOTONIC. */
#ifndef OCP_DRIVER_LISTENER_H
#define OCP_DRIVER_LISTENER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The owner of work: a listener, and the event of its profile in which the work was enqueued. */
typedef struct ocp_activity_owner {
  uint64_t listener; /* the listener's number; 0: no owner */
  uint64_t event;
} ocp_activity_owner;

/* A thread can be in two profiles at once: a session's and a Run's. */
enum { OCP_MAX_OWNERS = 2 };
typedef struct ocp_activity_owners {
  ocp_activity_owner each[OCP_MAX_OWNERS];
} ocp_activity_owners;

typedef enum ocp_activity_kind { OCP_ACTIVITY_KERNEL, OCP_ACTIVITY_COPY, OCP_ACTIVITY_SET } ocp_activity_kind;
typedef enum ocp_activity_direction { OCP_ACTIVITY_H2D, OCP_ACTIVITY_D2H, OCP_ACTIVITY_D2D } ocp_activity_direction;

typedef struct ocp_activity {
  uint64_t source; /* 0: unknown */
  uint64_t event;  /* the event of this listener's profile in which the work was enqueued */
  int64_t begin, end;
  const char *kernel; /* name, valid as long as the process; NULL: not a kernel, or `source` determines the name */
  uint64_t stream;
  uint64_t bytes;                      /* bytes of a copy or memset */
  uint32_t grid[3], block[3], dynamic; /* of a kernel; `dynamic` bytes of shared memory */
  uint8_t kind, direction;             /* ocp_activity_kind, ocp_activity_direction */
  bool in_graph;
  int32_t device; /* ordinal */
  int32_t thread; /* id of the host thread that ran the work in the call that enqueued it (emulated device), else 0 */
  /* For a node of a CUDA graph, as CUPTI reports it: the number of the list that has the source of each node of the
   * graph (ocp_tracer_layout), and CUPTI's correlation id of the graph's launch. Valid if `layout` is not 0; else
   * `source` is valid. */
  uint64_t layout, launch;
} ocp_activity;

int64_t ocp_activity_now(void);

typedef struct ocp_listener ocp_listener;

/* Creates a closed listener. NULL: out of memory. */
ocp_listener *ocp_listener_create(void);
/* Begin and end the delivery of activities to the listener. Threads may enter and leave its events at any time. */
void ocp_listener_open(ocp_listener *listener);
void ocp_listener_close(ocp_listener *listener);
/* Closes and frees the listener, which no thread may be using. Ignores NULL. */
void ocp_listener_destroy(ocp_listener *listener);
/* Returns the activities received since the last call, in any order; the caller frees them. *lost: number of activities
 * that were dropped because the listener had too many or host memory was exhausted. */
ocp_activity *ocp_listener_take(ocp_listener *listener, size_t *count, size_t *lost);
/* ocp_listener_number returns a number that no other listener of the process has. ocp_listener_is_open tells whether
 * the listener with that number exists and is open. */
uint64_t ocp_listener_number(const ocp_listener *listener);
bool ocp_listener_is_open(uint64_t number);

extern atomic_uint ocp_num_listeners;
/* Whether any listener is open: one relaxed load, the whole cost of profiling while it is off. */
static inline bool ocp_is_anybody_listening(void) {
  return atomic_load_explicit(&ocp_num_listeners, memory_order_relaxed) != 0;
}

/* Gives each owner's listener a copy of the activity, with that owner's `event`. The caller sets all other members. */
void ocp_activity_deliver(const ocp_activity_owners *owners, ocp_activity *activity);

#endif
