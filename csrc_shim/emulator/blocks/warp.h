/* Warp operations, for kernels. matrix.h numbers the types of mma. */
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
/* match.sync: mode 0 any, 1 all. */
uint32_t ocp_emu_match(ocp_emu_thread *thread, uint32_t mask, uint32_t mode, uint32_t value);
/* redux.sync: mode 0 add, 1 min.s32, 2 max.s32, 3 min.u32, 4 max.u32, 5 and, 6 or, 7 xor. */
uint32_t ocp_emu_reduce(ocp_emu_thread *thread, uint32_t mask, uint32_t mode, uint32_t value);

/* mma.sync: d = a * b + c. The arrays have the registers of this lane as 32-bit words. Bits of `form`: 0 to 3 type of
 * a, 4 to 7 type of b, 8 to 9 type of c and d, 10 to 11 rows / 8, 12 to 15 registers of b, 16 satfinite, 17 xor instead
 * of and (of b1). */
void ocp_emu_mma(ocp_emu_thread *thread, uint32_t form, const uint32_t *a, const uint32_t *b, const uint32_t *c,
                 uint32_t *d);
/* ldmatrix and stmatrix of `count` (1, 2, 4) matrices of 8 x 8 16-bit elements; `row` is the address of this lane's
 * row. */
void ocp_emu_load_matrix(ocp_emu_thread *thread, uint32_t count, uint32_t transposed, const void *row, uint32_t *d);
void ocp_emu_store_matrix(ocp_emu_thread *thread, uint32_t count, uint32_t transposed, void *row, const uint32_t *a);

#endif
