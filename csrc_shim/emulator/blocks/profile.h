/* Launch times, written to the file that ORT_CUDA_PLUGIN_EMULATE_PROFILE names. */
#ifndef OCP_EMULATOR_BLOCKS_PROFILE_H
#define OCP_EMULATOR_BLOCKS_PROFILE_H

#include <stdint.h>

#include "emulator/blocks/block.h"

/* Called around a launch: writes its time if ORT_CUDA_PLUGIN_EMULATE_PROFILE names a file. */
uint64_t emu_profile_begin(void);
void emu_profile_end(uint64_t begun, const emu_launch *launch);

#endif
