/* Makes the operation (op.h) for a kernel launch. */
#include "emulator/op.h"

#include <string.h>

#include "driver/activity.h"
#include "emulator/module.h"
#include "emulator/state.h"

/* Reads the value of a parameter; `kind` is an entry of ocp_emu_kernel_meta.params, which the loader has checked. Each
 * memcpy has a constant size, so that it compiles to one store. After a copy byte by byte, the read of `value` would
 * stall until all these stores have reached the cache (no store forwarding). */
static uint64_t param_value(const void *param, uint8_t kind) {
  uint64_t value = 0;
  switch (kind) {
  case 1:
    memcpy(&value, param, 1);
    break;
  case 2:
    memcpy(&value, param, 2);
    break;
  case 4:
    memcpy(&value, param, 4);
    break;
  default:
    memcpy(&value, param, 8);
  }
  return value;
}

CUresult emu_make_launch(emu_op *op, CUfunction function, const unsigned grid[3], const unsigned block[3],
                         unsigned shared_bytes, void **params, void **extra) {
  if (!function)
    return CUDA_ERROR_INVALID_HANDLE;
  const ocp_emu_kernel_meta *meta = function->meta;
  if (extra || (meta->num_params && !params))
    return emu_fail(CUDA_ERROR_INVALID_VALUE, "kernel \"%s\": parameters must be passed as kernelParams",
                    function->name);
  if (grid[0] == 0 || grid[1] == 0 || grid[2] == 0 || grid[0] > INT32_MAX || grid[1] > 65535 || grid[2] > 65535)
    return emu_fail(CUDA_ERROR_INVALID_VALUE,
                    "kernel \"%s\": grid (%u, %u, %u) is out of range, expected 1 to (2147483647, 65535, 65535)",
                    function->name, grid[0], grid[1], grid[2]);
  if (block[0] == 0 || block[1] == 0 || block[2] == 0 || block[0] > 1024 || block[1] > 1024 || block[2] > 64 ||
      block[0] * block[1] * block[2] > EMU_MAX_THREADS)
    return emu_fail(CUDA_ERROR_INVALID_VALUE,
                    "kernel \"%s\": block (%u, %u, %u) is out of range, expected 1 to (1024, 1024, 64), and at most %d "
                    "threads",
                    function->name, block[0], block[1], block[2], (int)EMU_MAX_THREADS);
  if (shared_bytes > function->max_dynamic_shared)
    return emu_fail(CUDA_ERROR_INVALID_VALUE,
                    "kernel \"%s\": %u bytes of dynamic shared memory, at most %u are allowed", function->name,
                    shared_bytes, function->max_dynamic_shared);
  op->kind = EMU_OP_KERNEL;
  op->num_params = meta->num_params;
  op->source = ocp_activity_source();
  op->kernel.function = function;
  memcpy(op->kernel.grid, grid, sizeof op->kernel.grid);
  memcpy(op->kernel.block, block, sizeof op->kernel.block);
  op->kernel.dynamic_shared = shared_bytes;
  for (uint32_t i = 0; i < meta->num_params; i++)
    op->params[i] = param_value(params[i], meta->params[i]);
  return CUDA_SUCCESS;
}
