/* The counting mode: some blocks of each launch run, and note what they access. */
#ifndef OCP_EMULATOR_BLOCKS_COUNT_H
#define OCP_EMULATOR_BLOCKS_COUNT_H

#include <stdint.h>

#include "emulator/config.h"
#include "emulator/kernel.h"

/* The present request to count (ocp_emu_count_launches); NULL: launches run normally. */
ocp_emu_count *emu_counting(void);
/* The next block whose accesses are noted, by its number among those that run; and its end. */
void emu_count_begin(ocp_emu_count *count, uint32_t number);
void emu_count_end(ocp_emu_count *count);

/* Until it is called again, launches of the process do what count says; NULL: they run normally. Only one thread may
 * launch meanwhile. */
void ocp_emu_count_launches(ocp_emu_count *count);

/* ---- for kernels ---- */
/* Counting mode: before each access through a pointer that is not provably on the stack, at the place of that number;
 * `what` as in ocp_emu_access. And once for each part of the kernel that a thread goes through. */
void ocp_emu_count_access(ocp_emu_thread *thread, const void *address, uint32_t what, uint32_t place);
void ocp_emu_count_part(ocp_emu_thread *thread, uint32_t place);

#endif
