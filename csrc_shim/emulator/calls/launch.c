/* Kernel launches of the emulated driver (cuLaunchKernel). */
#include "emulator/calls/launch.h"

#include "emulator/kernel.h"
#include "emulator/module.h"
#include "emulator/op.h"
#include "emulator/state.h"
#include "emulator/work/enqueue.h"
#include "emulator/work/stream_list.h"

CUresult emu_func_set_attribute(CUfunction function, int attribute, int value) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (result)
    return result;
  if (!function)
    return CUDA_ERROR_INVALID_HANDLE;
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || value < 0 ||
      (uint32_t)value + function->meta->static_shared_bytes > EMU_MAX_SHARED)
    return emu_fail(CUDA_ERROR_INVALID_VALUE,
                    "kernel \"%s\": the function attribute (CUfunction_attribute) %d cannot be %d", function->name,
                    attribute, value);
  function->max_dynamic_shared = (uint32_t)value;
  return CUDA_SUCCESS;
}

CUresult emu_launch_kernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                           unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void **params,
                           void **extra) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (result)
    return result;
  const unsigned grid[3] = {grid_x, grid_y, grid_z}, block[3] = {block_x, block_y, block_z};
  emu_any_op any;
  result = emu_make_launch(&any.op, function, grid, block, shared_bytes, params, extra);
  return result ? result : emu_enqueue(emu_stream_of(device, stream), &any.op);
}
