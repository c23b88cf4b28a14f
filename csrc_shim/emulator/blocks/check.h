/* The checking mode: checks the memory accesses, barriers and warp operations of kernels. */
#ifndef OCP_EMULATOR_BLOCKS_CHECK_H
#define OCP_EMULATOR_BLOCKS_CHECK_H

#include "driver/driver.h"
#include "emulator/blocks/block.h"
#include "emulator/clock.h"
#include "emulator/kernel.h"

/* Called before a block: fills its shared memory with NaN bytes and marks it as not written. False: out of host
 * memory. */
bool emu_check_block(emu_cpu *cpu);
/* Returns the result of a finished launch. If the launch had findings, the result is an error with the text of the
 * launch's latest finding. */
CUresult emu_check_launched(emu_launch *launch);
/* Reports that some threads of the block wait for others that never arrive. */
void emu_check_divergence(emu_cpu *cpu);
/* Whether these bytes at host address `host` are on the running thread's stack, in its module's writable data or, if
 * the access is a load (`loads`), in the module's constants. */
bool emu_is_of_thread(const ocp_emu_thread *thread, uint64_t host, uint32_t bytes, bool loads);

/* Reports an access whose address is not a multiple of `bytes`. */
void emu_check_aligned(ocp_emu_thread *thread, emu_access access, const void *address, uint32_t bytes);
/* Reports a mask of a warp operation that leaves out the calling lane. */
void emu_check_mask(ocp_emu_thread *thread, const char *operation, uint32_t mask);

/* Checking mode, for PTX: registers the local memory of a function, and marks it as unwritten. `memory`: `bytes` bytes
 * of local memory, followed by `bytes` shadow bytes (emu_local). Returns `memory`. */
void *ocp_emu_local_begin(ocp_emu_thread *thread, void *memory, uint32_t bytes);
/* Checking mode: a kernel calls these before each access through a pointer that is not provably on the stack. */
void ocp_emu_check_load(ocp_emu_thread *thread, const void *address, uint32_t bytes);
void ocp_emu_check_store(ocp_emu_thread *thread, const void *address, uint32_t bytes);
void ocp_emu_check_atomic(ocp_emu_thread *thread, const void *address, uint32_t bytes);

#endif
