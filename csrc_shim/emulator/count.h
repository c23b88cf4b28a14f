/* The counting mode: some blocks of each launch run, and note what they access. */
#ifndef OCP_EMULATOR_COUNT_H
#define OCP_EMULATOR_COUNT_H

#include "emulator/emulator.h"
#include "emulator/launch.h"

/* What launches are counted in; NULL: they run as ever. */
ocp_emu_count *emu_counting(void);
/* The next block whose accesses are noted, by its number among those that run; and its end. */
void emu_count_begin(ocp_emu_count *count, uint32_t number);
void emu_count_end(ocp_emu_count *count);

#endif
