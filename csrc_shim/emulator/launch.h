/* A running launch. */
#ifndef OCP_EMULATOR_LAUNCH_H
#define OCP_EMULATOR_LAUNCH_H

#include <stdatomic.h>
#include <stdint.h>

#include "driver/driver.h"
#include "emulator/clock.h"
#include "emulator/op.h"
#include "emulator/state.h"

typedef struct emu_launch {
  const struct CUfunc_st *function;
  const void *const *params;
  uint32_t grid[3], block[3];
  uint32_t threads; /* of a block */
  uint32_t dynamic_shared;
  uint64_t blocks;
  emu_device *device;
  const emu_clock *clock;
  _Atomic int error;
  _Atomic unsigned found; /* kinds of findings */
} emu_launch;

/* Checks a launch and makes it an operation. */
CUresult emu_make_launch(emu_op *op, CUfunction function, const unsigned grid[3], const unsigned block[3],
                         unsigned shared_bytes, void **params, void **extra);
CUresult emu_run_kernel(emu_device *device, const emu_op *op, const emu_clock *clock);

#endif
