/* The threads of a block as fibers of one host thread. */
#ifndef OCP_EMULATOR_BLOCKS_FIBER_H
#define OCP_EMULATOR_BLOCKS_FIBER_H

#include <stdbool.h>
#include <stdint.h>

#include "emulator/blocks/block.h"
#include "emulator/kernel.h"

/* The fibers that the calling host thread runs. Read from here and not from the fiber, whose own loads would have to
 * come first: a switch is a chain of loads, and this halves its length.
 * The price of "initial-exec": all thread-local data of the library come out of the about 1.5 KB that glibc keeps for
 * libraries that a process loads late, so they are to be few. */
extern _Thread_local __attribute__((tls_model("initial-exec"))) emu_cpu *emu_running;

/* Takes a thread from those that can run, before it waits. */
static inline void emu_block_thread(emu_cpu *cpu, uint32_t index) {
  uint32_t warp = index / EMU_WARP;
  if (!(cpu->warps[warp].runnable &= ~((uint32_t)1 << index % EMU_WARP)))
    cpu->runnable_warps &= ~((uint32_t)1 << warp);
}
/* Runs other threads; returns when one of them has made this thread runnable again. */
void emu_yield(emu_cpu *cpu, uint32_t index);

/* Makes sure of stacks for the launch's fibers; false: out of host memory. */
bool emu_fibers_prepare(emu_cpu *cpu, const emu_launch *launch);
/* Runs one block whose threads are fibers; the fields of cpu->fibers that stay the same in a launch are set. False:
 * some threads wait for others that never come (cpu->warps has who waits for what). */
bool emu_fibers_run_block(emu_cpu *cpu, const uint32_t block[3]);
/* Leaves the running block at once, from inside a kernel. */
_Noreturn void emu_abandon_block(ocp_emu_thread *thread);

/* ---- for kernels ---- */
/* __syncthreads and friends. A fiber that ends without arriving at a barrier the others wait at is a divergence error.
 */
void ocp_emu_barrier(ocp_emu_thread *thread);

#endif
