/* Members of the driver table: kernel launches. */
#ifndef OCP_EMULATOR_CALLS_LAUNCH_H
#define OCP_EMULATOR_CALLS_LAUNCH_H

#include "driver/driver.h"

CUresult emu_func_set_attribute(CUfunction function, int attribute, int value);
CUresult emu_launch_kernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                           unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void **params,
                           void **extra);

#endif
