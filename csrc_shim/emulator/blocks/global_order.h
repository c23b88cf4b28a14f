/* The checking mode, for kernels from PTX: finds races between the blocks of one launch in global memory. */
#ifndef OCP_EMULATOR_BLOCKS_GLOBAL_ORDER_H
#define OCP_EMULATOR_BLOCKS_GLOBAL_ORDER_H

#include "emulator/blocks/block.h"
#include "emulator/kernel.h"

/* Flags of an access, for ocp_emu_check_access; its two lowest bits are the emu_access. */
enum {
  EMU_STRONG = 4,     /* volatile, relaxed or ordered: never reported as a race */
  EMU_ACQUIRES = 8,   /* orders the thread's later accesses after it */
  EMU_RELEASES = 16,  /* orders the thread's earlier accesses before it */
  EMU_READ_ONLY = 32, /* ld.global.nc: the launch must not write the memory */
  EMU_OF_BLOCK = 64   /* the scope is .cta */
};

/* Called before and after a launch. False: out of host memory. */
bool emu_global_begin(emu_launch *launch);
void emu_global_end(emu_launch *launch);
/* Reports the store in cpu->doubt as a race if it has changed a byte. Afterwards no store is doubtful. */
void emu_global_settle(emu_cpu *cpu);

/* A kernel calls this before an access: checks that the address is a multiple of `bytes`, and checks and records an
 * access to global memory. `what`: an emu_access with the flags above. */
void ocp_emu_check_access(ocp_emu_thread *thread, const void *address, uint32_t bytes, uint32_t what);
/* A kernel calls this for a fence. `what`: EMU_OF_BLOCK for .cta scope, else 0. */
void ocp_emu_fence(ocp_emu_thread *thread, uint32_t what);

#endif
