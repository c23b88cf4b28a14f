/* Runs operations, and reports their times to the open profiles. */
#ifndef OCP_EMULATOR_WORK_OBSERVE_H
#define OCP_EMULATOR_WORK_OBSERVE_H

#include "driver/activity.h"
#include "emulator/clock.h"
#include "emulator/op.h"

/* The circumstances in which an operation was enqueued. */
typedef struct emu_context {
  CUstream stream;
  ocp_activity_owners owners; /* the owners when it was enqueued */
  bool observed;              /* true: the owners want its times; false: `owners` is undefined */
  bool is_inline;             /* runs in the call that enqueued it */
  bool deferred;              /* made earlier, as a node of a graph or an item of a queue: see emu_run */
  bool in_graph;
} emu_context;

/* The context of work that the calling thread enqueues on the stream now. */
emu_context emu_context_of(CUstream stream);

/* emu_run that reports the operation's times to the owners. */
CUresult emu_run_observed(const emu_context *context, const emu_op *op, const emu_clock *clock);

#endif
