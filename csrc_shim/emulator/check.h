/* The checking mode: findings, and the checks of operations. Every function returns at once while config.check is 0. */
#ifndef OCP_EMULATOR_CHECK_H
#define OCP_EMULATOR_CHECK_H

#include "driver/driver.h"
#include "emulator/clock.h"
#include "emulator/fiber.h"
#include "emulator/launch.h"
#include "emulator/op.h"

/* Before an operation runs; a result other than 0 is that of the operation. */
CUresult emu_check_op(const emu_op *op, const emu_clock *clock);

/* Before a block: its shared memory has the bytes of NaN, and counts as not written. False: out of host memory. */
bool emu_check_block(emu_cpu *cpu);
/* The result of a launch that has run, with its finding as the text where it has one. */
CUresult emu_check_launched(emu_launch *launch);
/* Reports that some threads of the block wait for others that never come. */
void emu_check_divergence(emu_cpu *cpu);
/* Whether these bytes are on the stack that runs, or constants of the thread's kernel, which may only be loaded. */
bool emu_is_of_thread(const ocp_emu_thread *thread, uint64_t host, uint32_t bytes, bool loads);

#endif
