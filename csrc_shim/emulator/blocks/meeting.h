/* Warp operations: lanes that wait for each other, and the results of shuffles and votes. */
#ifndef OCP_EMULATOR_BLOCKS_MEETING_H
#define OCP_EMULATOR_BLOCKS_MEETING_H

#include <stdbool.h>
#include <stdint.h>

#include "emulator/blocks/block.h"

/* Operations of emu_meeting; the modes of shfl and vote are added. */
enum { EMU_SHUFFLE = 0, EMU_VOTE = 4, EMU_BARRIER = 8 };

/* Lets the lanes go on that meet like `lane`, with their results, when all of them that live are there. */
bool emu_warp_complete(emu_cpu *cpu, emu_warp *warp, uint32_t lane);
/* After a lane has ended: makes the lanes runnable that waited for this lane only. */
void emu_warp_lane_ended(emu_cpu *cpu, emu_warp *warp);

#endif
