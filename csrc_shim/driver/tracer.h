/* Attributes CUPTI's records to the work of Runs. Python starts CUPTI and reads its records; during Runs, the enqueuing
 * thread pushes external correlation ids, and CUPTI returns in each record the id that was pushed last. An id stands
 * for the owners and the source of some work.
 *
 *     start -> push, enqueue, pop (in Runs) -> deliver (CUPTI's records, with ids) -> stop
 *
 * A session of the tracer lasts from start to stop. Ids and layout numbers of an earlier session are invalid. */
#ifndef OCP_DRIVER_TRACER_H
#define OCP_DRIVER_TRACER_H

#include <stdatomic.h>
#include <stdbool.h>

#include "driver/listener.h"

/* CUPTI's functions that push and pop external correlation ids of one `kind`. */
typedef struct ocp_tracer_functions {
  int (*push)(int kind, uint64_t id);
  int (*pop)(int kind, uint64_t *id);
  int kind;
} ocp_tracer_functions;

/* An activity record of CUPTI. */
typedef struct ocp_trace_record {
  uint64_t id;     /* the external correlation id */
  uint64_t launch; /* CUPTI's correlation id: equal in all records of one driver call */
  int64_t begin, end;
  const char *kernel; /* name, which ocp_tracer_deliver copies; NULL: not a kernel */
  uint64_t stream, bytes;
  uint32_t grid[3], block[3], dynamic;
  uint32_t kind, direction;
  int32_t device;
  bool in_graph;
} ocp_trace_record;

void ocp_tracer_start(const ocp_tracer_functions *functions);
void ocp_tracer_stop(void);
/* Delivers a record to the owners of its correlation id; ignores a record without owners. */
void ocp_tracer_deliver(const ocp_trace_record *record);

/* The sources (activity.h) of a CUDA graph's nodes, in the order in which the nodes run. The tracer keeps a copy of
 * this list, called a layout, because CUPTI's records arrive later. */
typedef struct ocp_graph_sources {
  uint64_t *each;
  uint32_t count, capacity;
  uint64_t layout; /* number of the layout with a copy of `each`; valid while `session` is the tracer's session */
  uint32_t session;
} ocp_graph_sources;

extern atomic_bool ocp_tracer_is_on;
static inline bool ocp_is_tracing(void) { return atomic_load_explicit(&ocp_tracer_is_on, memory_order_relaxed); }
/* Attributes the work that the calling thread enqueues from now on to these owners and this source, or if `graph` is
 * not NULL to the sources of that graph's nodes. If it returns true, the caller must call ocp_tracer_pop. */
bool ocp_tracer_push(const ocp_activity_owners *owners, uint64_t source, ocp_graph_sources *graph);
void ocp_tracer_pop(void);
/* Returns the sources in a layout, valid until the tracer stops; NULL: no such layout. */
const uint64_t *ocp_tracer_layout(uint64_t layout, uint32_t *count);

#endif
