/* Runs operations, and reports their times to the profiles that are open. */
#ifndef OCP_EMULATOR_WORK_OBSERVE_H
#define OCP_EMULATOR_WORK_OBSERVE_H

#include "driver/activity.h"
#include "emulator/clock.h"
#include "emulator/op.h"

/* How an operation comes to run. */
typedef struct emu_context {
  CUstream stream;
  ocp_activity_owners owners; /* when it was enqueued */
  bool observed;              /* by those; else the owners mean nothing */
  bool is_inline;             /* in the call that enqueued it */
  bool in_graph;
} emu_context;

/* The context of what the calling thread enqueues on the stream now. */
emu_context emu_context_of(CUstream stream);

/* emu_run, with its times where they are asked for. */
CUresult emu_run_observed(const emu_context *context, const emu_op *op, const emu_clock *clock);

#endif
