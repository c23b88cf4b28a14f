/* Warp operations: lanes that wait for each other, and the results of shuffles, votes, matches and reductions. */
#ifndef OCP_EMULATOR_BLOCKS_MEETING_H
#define OCP_EMULATOR_BLOCKS_MEETING_H

#include <stdbool.h>
#include <stdint.h>

#include "emulator/blocks/block.h"

/* If all live lanes that take part in the operation of `lane` have arrived, gives them their results, makes them
 * runnable and returns true. */
bool emu_warp_complete(emu_cpu *cpu, emu_warp *warp, uint32_t lane);
/* Called after a lane of the warp has ended: completes the operations that waited for this lane only. */
void emu_warp_lane_ended(emu_cpu *cpu, emu_warp *warp);

#endif
