/* Executes operations, and says which ranges of memory they may touch. */
#ifndef OCP_EMULATOR_WORK_EXECUTE_H
#define OCP_EMULATOR_WORK_EXECUTE_H

#include <stdbool.h>
#include <stdint.h>

#include "driver/driver.h"
#include "emulator/clock.h"
#include "emulator/op.h"
#include "emulator/state.h"

/* Runs the operation to its end in the calling thread (and the workers). clock: of the operation, in checking mode. */
CUresult emu_run(emu_device *device, const emu_op *op, const emu_clock *clock);
/* Whether the range lies in one live allocation of a device; whether it is host memory that is not page-locked, so that
 * a copy holds the host up. */
bool emu_device_range(uint64_t address, uint64_t bytes);
bool emu_is_pageable(const void *pointer, uint64_t bytes);

#endif
