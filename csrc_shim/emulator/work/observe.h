/* Runs operations, and reports their times to the open profiles. */
#ifndef OCP_EMULATOR_WORK_OBSERVE_H
#define OCP_EMULATOR_WORK_OBSERVE_H

#include "driver/activity.h"
#include "emulator/clock.h"
#include "emulator/op.h"

/* Where and how an operation was enqueued. */
typedef struct emu_context {
  CUstream stream;
  ocp_activity_owners owners; /* the profile events that were open when the operation was enqueued */
  bool observed;              /* true: a profile event was open; false: `owners` may be uninitialized */
  bool is_inline;             /* true: the call that enqueued the operation runs it */
  bool deferred;              /* true: runs later than it was made, from a graph or a queue */
  bool in_graph;
} emu_context;

/* Returns the context of work that the calling thread enqueues on the stream now. */
emu_context emu_context_of(CUstream stream);

/* Calls emu_run, and reports the operation's times to its owners. */
CUresult emu_run_observed(const emu_context *context, const emu_op *op, const emu_clock *clock);

#endif
