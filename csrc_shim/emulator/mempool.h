/* Memory pools. */
#ifndef OCP_EMULATOR_MEMPOOL_H
#define OCP_EMULATOR_MEMPOOL_H

#include <stdint.h>

#include "emulator/state.h"

void emu_mempool_run_free(uint64_t address);
/* Somebody has waited for work of the device. */
void emu_mempools_synchronized(const emu_device *device);

#endif
