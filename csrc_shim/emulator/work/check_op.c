/* The checking mode: checks copies and memsets, and marks memory that a kernel compiled without checks may write. */
#include "emulator/work/check_op.h"

#include <stdio.h>

#include "emulator/clock.h"
#include "emulator/findings.h"
#include "emulator/heap.h"
#include "emulator/module.h"
#include "emulator/shadow.h"
#include "emulator/state.h"

static CUresult note_range(const emu_clock *clock, const char *what, uint64_t address, uint64_t bytes,
                           emu_access access) {
  uint64_t other = 0;
  for (uint64_t at = address, end = address + bytes; at < end;) {
    uint64_t within = at % EMU_GRANULE, last = within + (end - at) - 1;
    last = last < EMU_GRANULE ? last : EMU_GRANULE - 1;
    uint64_t conflict = emu_history_note(emu_history_of(at), clock, (uint32_t)within, (uint32_t)last, access);
    other = other ? other : conflict;
    at += last - within + 1;
  }
  if (!other)
    return CUDA_SUCCESS;
  char name[100], where[200];
  emu_clock_describe(other, name, sizeof name);
  snprintf(where, sizeof where, "no event, stream order or wait orders this after %s", name);
  return emu_finding_report(EMU_MISSING_WAIT, what, address, bytes, where);
}

static CUresult check_copy(const emu_op *op, const emu_clock *clock) {
  const char *what = op->copy.src_host   ? "copy to the device"
                     : op->copy.dst_host ? "copy to the host"
                                         : "copy within the device";
  uint64_t dst = op->copy.dst, src = op->copy.src, bytes = op->copy.bytes;
  CUresult result = CUDA_SUCCESS;
  emu_clock_name(clock, what);
  if (!op->copy.src_host)
    result = note_range(clock, what, src, bytes, EMU_LOAD);
  if (!op->copy.dst_host && !result)
    result = note_range(clock, what, dst, bytes, EMU_STORE);
  if (op->copy.src_host) {
    emu_shadow_written(dst, bytes);
  } else if (!op->copy.dst_host) {
    emu_shadow_copied(dst, src, bytes);
  } else {
    uint64_t unwritten = emu_shadow_first_not(src, bytes, EMU_BYTE_WRITTEN);
    if (unwritten < bytes && !result) {
      char where[200];
      emu_finding_locate(src + unwritten, where, sizeof where);
      result = emu_finding_report(EMU_UNINITIALIZED_READ, what, src, bytes, where);
    }
  }
  return result;
}

/* Marks the allocations into which the kernel's parameters point as written, because the checking mode cannot observe
 * the stores of a kernel compiled without checks. */
static void trust(const emu_op *op) {
  const ocp_emu_kernel_meta *meta = op->kernel.function->meta;
  for (uint32_t i = 0; i < op->num_params; i++) {
    uint64_t start, size;
    if (meta->params[i] == OCP_EMU_PARAM_POINTER && emu_is_device_address(op->params[i]) &&
        emu_heap_find(&emu_device_of(op->params[i])->heap, op->params[i], 0, &start, &size))
      emu_shadow_written(start, size);
  }
}

CUresult emu_check_op(const emu_op *op, const emu_clock *clock) {
  switch (op->kind) {
  case EMU_OP_KERNEL:
    emu_clock_name(clock, op->kernel.function->name);
    if (!op->kernel.function->meta->checked)
      trust(op);
    return CUDA_SUCCESS;
  case EMU_OP_COPY:
    return check_copy(op, clock);
  case EMU_OP_SET:
    emu_clock_name(clock, "fill");
    emu_shadow_written(op->set.dst, op->set.bytes);
    return note_range(clock, "fill", op->set.dst, op->set.bytes, EMU_STORE);
  case EMU_OP_FREE:
  case EMU_OP_REUSE:
    break;
  }
  return CUDA_SUCCESS;
}
