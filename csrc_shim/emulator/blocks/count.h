/* The counting mode: runs some blocks of each launch and records their accesses. */
#ifndef OCP_EMULATOR_BLOCKS_COUNT_H
#define OCP_EMULATOR_BLOCKS_COUNT_H

#include <stdint.h>

#include "emulator/config.h"
#include "emulator/kernel.h"

/* Returns the current request of ocp_emu_count_launches; NULL: launches run normally. */
ocp_emu_count *emu_counting(void);
/* Begin and end the recording of a block; `number`: its index among the blocks that run. */
void emu_count_begin(ocp_emu_count *count, uint32_t number);
void emu_count_end(ocp_emu_count *count);

/* Makes all launches of the process run in the counting mode, with their accesses recorded in `count`, until the next
 * call; NULL: launches run normally. Only one thread may launch meanwhile. */
void ocp_emu_count_launches(ocp_emu_count *count);

/* ---- for kernels ---- */
/* Counting mode. A kernel calls ocp_emu_count_access before each access through a pointer that is not provably on the
 * stack (`what`: as in ocp_emu_access), and ocp_emu_count_part once for each basic block that a thread executes.
 * `place`: number of the instruction or basic block, from 0. */
void ocp_emu_count_access(ocp_emu_thread *thread, const void *address, uint32_t what, uint32_t place);
void ocp_emu_count_part(ocp_emu_thread *thread, uint32_t place);

#endif
