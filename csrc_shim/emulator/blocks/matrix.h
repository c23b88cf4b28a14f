/* mma, ldmatrix and stmatrix. The lane that arrives last computes for all lanes of the warp. */
#ifndef OCP_EMULATOR_BLOCKS_MATRIX_H
#define OCP_EMULATOR_BLOCKS_MATRIX_H

#include <stdint.h>

#include "emulator/blocks/block.h"

/* Element types of a and b in the parameter `form` of ocp_emu_mma (warp.h). */
enum { EMU_F16, EMU_BF16, EMU_TF32, EMU_S8, EMU_U8, EMU_E4M3, EMU_E5M2, EMU_S4, EMU_U4, EMU_B1, EMU_F64 };
/* Types of accumulators in `form`. */
enum { EMU_SUM_F32, EMU_SUM_F16, EMU_SUM_S32, EMU_SUM_F64 };

/* Computes the results of the lanes in `mask`, which have all arrived at the operation `meeting`. */
void emu_matrix_complete(emu_cpu *cpu, const emu_warp *warp, const emu_meeting *meeting, uint32_t mask);

#endif
