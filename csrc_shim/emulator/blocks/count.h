/* The counting mode: runs some blocks of each launch and records their accesses. */
#ifndef OCP_EMULATOR_BLOCKS_COUNT_H
#define OCP_EMULATOR_BLOCKS_COUNT_H

#include <stdint.h>

#include "emulator/config.h"
#include "emulator/kernel.h"

/* The present request to count (ocp_emu_count_launches); NULL: launches run normally. */
ocp_emu_count *emu_counting(void);
/* Begins and ends the recording of the next block, by its number among those that run. */
void emu_count_begin(ocp_emu_count *count, uint32_t number);
void emu_count_end(ocp_emu_count *count);

/* From now on all launches of the process are counted into `count`, until the next call; NULL: launches run
 * normally. Only one thread may launch meanwhile. */
void ocp_emu_count_launches(ocp_emu_count *count);

/* ---- for kernels ---- */
/* Counting mode: called before each access through a pointer that is not provably on the stack, with the number of
 * the instruction; `what` as in ocp_emu_access. Also called once for each basic block that a thread executes. */
void ocp_emu_count_access(ocp_emu_thread *thread, const void *address, uint32_t what, uint32_t place);
void ocp_emu_count_part(ocp_emu_thread *thread, uint32_t place);

#endif
