/* The checking mode: the checks of kernels. */
#ifndef OCP_EMULATOR_BLOCKS_CHECK_H
#define OCP_EMULATOR_BLOCKS_CHECK_H

#include "driver/driver.h"
#include "emulator/blocks/block.h"
#include "emulator/clock.h"
#include "emulator/kernel.h"

/* Called before a block: fills its shared memory with NaN bytes and marks it as not written. False: out of host
 * memory. */
bool emu_check_block(emu_cpu *cpu);
/* Returns the result of a finished launch, with its finding as the error text if there is one. */
CUresult emu_check_launched(emu_launch *launch);
/* Reports that some threads of the block wait for others that never arrive. */
void emu_check_divergence(emu_cpu *cpu);
/* Whether these bytes are on the running thread's stack, or, if `loads`, data of its kernel's module. */
bool emu_is_of_thread(const ocp_emu_thread *thread, uint64_t host, uint32_t bytes, bool loads);

/* Reports an access whose address is not a multiple of its bytes. */
void emu_check_aligned(ocp_emu_thread *thread, emu_access access, const void *address, uint32_t bytes);
/* Reports a mask of a warp operation that leaves out the calling lane. */
void emu_check_mask(ocp_emu_thread *thread, const char *operation, uint32_t mask);

/* Checking mode, for PTX: the local memory of a function, with as many bytes after it for the check. Returns it. */
void *ocp_emu_local_begin(ocp_emu_thread *thread, void *memory, uint32_t bytes);
/* Checking mode: called before each access through a pointer that is not provably on the stack. */
void ocp_emu_check_load(ocp_emu_thread *thread, const void *address, uint32_t bytes);
void ocp_emu_check_store(ocp_emu_thread *thread, const void *address, uint32_t bytes);
void ocp_emu_check_atomic(ocp_emu_thread *thread, const void *address, uint32_t bytes);

#endif
