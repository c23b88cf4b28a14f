#include "emulator/work/observe.h"

#include "emulator/work/execute.h"

emu_context emu_context_of(CUstream stream) {
  emu_context context;
  context.stream = stream;
  context.observed = ocp_activity_owned(&context.owners);
  context.is_inline = context.in_graph = false;
  context.deferred = true;
  return context;
}

static void describe(const emu_op *op, ocp_activity *activity) {
  switch (op->kind) {
  case EMU_OP_KERNEL:
    activity->kind = OCP_ACTIVITY_KERNEL;
    activity->dynamic = op->kernel.dynamic_shared;
    for (int i = 0; i < 3; i++) {
      activity->grid[i] = op->kernel.grid[i];
      activity->block[i] = op->kernel.block[i];
    }
    break;
  case EMU_OP_COPY:
    activity->kind = OCP_ACTIVITY_COPY;
    activity->bytes = op->copy.bytes;
    activity->direction = op->copy.src_host   ? OCP_ACTIVITY_H2D
                          : op->copy.dst_host ? OCP_ACTIVITY_D2H
                                              : OCP_ACTIVITY_D2D;
    break;
  default:
    activity->kind = OCP_ACTIVITY_SET;
    activity->bytes = op->set.bytes;
  }
}

CUresult emu_run_observed(const emu_context *context, const emu_op *op, const emu_clock *clock) {
  emu_device *device = context->stream->device;
  if (!context->observed || op->kind == EMU_OP_REUSE || op->kind == EMU_OP_FREE)
    return emu_run(device, op, context->deferred, clock);
  ocp_activity activity = {
      .source = op->source,
      .stream = (uint64_t)context->stream,
      .in_graph = context->in_graph,
      .device = device->ordinal,
      .thread = context->is_inline ? ocp_activity_thread() : 0,
  };
  describe(op, &activity);
  activity.begin = ocp_activity_now();
  const CUresult result = emu_run(device, op, context->deferred, clock);
  activity.end = ocp_activity_now();
  ocp_activity_deliver(&context->owners, &activity);
  return result;
}
