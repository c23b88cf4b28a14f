/* Executes operations: copies, memsets, kernels, and stream-ordered frees of memory pools. */
#include "emulator/work/execute.h"

#include <string.h>

#include "emulator/blocks/grid.h"
#include "emulator/heap.h"
#include "emulator/mempool.h"
#include "emulator/shadow.h"
#include "emulator/work/check_op.h"

bool emu_device_range(uint64_t address, uint64_t bytes) {
  return emu_is_device_address(address) && emu_heap_find(&emu_device_of(address)->heap, address, bytes, NULL, NULL) &&
         !emu_shadow_is_freed(address);
}

bool emu_is_pageable(const void *pointer, uint64_t bytes) {
  uint64_t address = (uint64_t)pointer;
  return !(emu_is_pinned_address(address) && emu_heap_find(&emu.pinned, address, bytes, NULL, NULL));
}

static void *host_view(uint64_t address, bool host) { return (void *)(host ? address : address + (uint64_t)emu.alias); }

/* Runs a copy. The ranges of a deferred copy are checked here, since the memory may have been freed meanwhile. */
static CUresult run_copy(const emu_op *op, bool deferred, const emu_clock *clock) {
  if (deferred && ((!op->copy.dst_host && !emu_device_range(op->copy.dst, op->copy.bytes)) ||
                   (!op->copy.src_host && !emu_device_range(op->copy.src, op->copy.bytes))))
    return emu_fail(CUDA_ERROR_ILLEGAL_ADDRESS, "a copy touches memory that was freed before it ran");
  CUresult result = clock ? emu_check_op(op, clock) : CUDA_SUCCESS;
  memmove(host_view(op->copy.dst, op->copy.dst_host), host_view(op->copy.src, op->copy.src_host), op->copy.bytes);
  return result;
}

static CUresult run_set(const emu_op *op, bool deferred, const emu_clock *clock) {
  if (deferred && !emu_device_range(op->set.dst, op->set.bytes))
    return emu_fail(CUDA_ERROR_ILLEGAL_ADDRESS, "a memset touches memory that was freed before it ran");
  CUresult result = clock ? emu_check_op(op, clock) : CUDA_SUCCESS;
  memset(host_view(op->set.dst, false), op->set.value, op->set.bytes);
  return result;
}

CUresult emu_run(emu_device *device, const emu_op *op, bool deferred, const emu_clock *clock) {
  switch (op->kind) {
  case EMU_OP_KERNEL: {
    CUresult result = clock ? emu_check_op(op, clock) : CUDA_SUCCESS;
    return result ? result : emu_run_kernel(device, op, clock);
  }
  case EMU_OP_COPY:
    return run_copy(op, deferred, clock);
  case EMU_OP_SET:
    return run_set(op, deferred, clock);
  case EMU_OP_REUSE:
    emu_shadow_reused(op->reuse.address, op->reuse.bytes, op->reuse.held);
    return CUDA_SUCCESS;
  case EMU_OP_FREE:
    emu_mempool_run_free(op->free.address);
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}
