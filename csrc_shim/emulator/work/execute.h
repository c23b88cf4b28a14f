/* Executes operations, and checks the memory ranges that they access. */
#ifndef OCP_EMULATOR_WORK_EXECUTE_H
#define OCP_EMULATOR_WORK_EXECUTE_H

#include <stdbool.h>
#include <stdint.h>

#include "driver/driver.h"
#include "emulator/clock.h"
#include "emulator/op.h"
#include "emulator/state.h"

/* Runs the operation to completion in the calling thread (and the workers). `deferred`: time has passed since the call
 * that made the operation, so its memory ranges must be checked again. clock: the operation's vector clock in the
 * checking mode. */
CUresult emu_run(emu_device *device, const emu_op *op, bool deferred, const emu_clock *clock);
/* emu_device_range: whether the range lies in one live allocation of a device. emu_is_pageable: whether the range is
 * pageable host memory, to which a copy blocks the host. */
bool emu_device_range(uint64_t address, uint64_t bytes);
bool emu_is_pageable(const void *pointer, uint64_t bytes);

#endif
