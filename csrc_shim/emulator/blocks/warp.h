/* Warp operations, for kernels. */
#ifndef OCP_EMULATOR_BLOCKS_WARP_H
#define OCP_EMULATOR_BLOCKS_WARP_H

#include <stdint.h>

#include "emulator/kernel.h"

/* bar.warp.sync */
void ocp_emu_warp_barrier(ocp_emu_thread *thread, uint32_t mask);
/* shfl.sync: mode 0 idx, 1 up, 2 down, 3 bfly; value is the raw 32 bits; clamp is the c operand of PTX shfl. */
uint32_t ocp_emu_shfl(ocp_emu_thread *thread, uint32_t mask, uint32_t mode, uint32_t value, uint32_t lane,
                      uint32_t clamp, uint32_t *predicate);
/* vote.sync: mode 0 all, 1 any, 2 uni (0 or 1), 3 ballot. */
uint32_t ocp_emu_vote(ocp_emu_thread *thread, uint32_t mask, uint32_t mode, uint32_t predicate);

#endif
