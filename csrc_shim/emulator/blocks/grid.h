/* Runs the grid of a launch. */
#ifndef OCP_EMULATOR_BLOCKS_GRID_H
#define OCP_EMULATOR_BLOCKS_GRID_H

#include "driver/driver.h"
#include "emulator/clock.h"
#include "emulator/op.h"
#include "emulator/state.h"

/* Runs the kernel launch `op`, and returns when all blocks have run. clock: the vector clock of `op` in the checking
 * mode. */
CUresult emu_run_kernel(emu_device *device, const emu_op *op, const emu_clock *clock);

#endif
