/* The threads of a block as fibers of one host thread. */
#ifndef OCP_EMULATOR_BLOCKS_FIBER_H
#define OCP_EMULATOR_BLOCKS_FIBER_H

#include <stdbool.h>
#include <stdint.h>

#include "emulator/blocks/block.h"
#include "emulator/kernel.h"

/* The emu_cpu whose fibers the calling host thread runs. A switch of fibers is a chain of dependent loads; this
 * variable halves the chain, compared with a pointer in the fiber. "initial-exec" has a price: glibc reserves
 * about 1.5 KB of thread-local storage for all libraries that dlopen loads, so this library must have few thread-local
 * variables. */
extern _Thread_local __attribute__((tls_model("initial-exec"))) emu_cpu *emu_running;

/* Removes a thread from the runnable threads, before it waits. */
static inline void emu_block_thread(emu_cpu *cpu, uint32_t index) {
  uint32_t warp = index / EMU_WARP;
  if (!(cpu->warps[warp].runnable &= ~((uint32_t)1 << index % EMU_WARP)))
    cpu->runnable_warps &= ~((uint32_t)1 << warp);
}
/* Switches from the calling fiber to the host thread's own stack, where the host thread calls emu_launch_continues. If
 * that function returns false, the block ends, and emu_rest does not return. */
void emu_rest(emu_cpu *cpu);
/* Counts a step (EMU_PATIENCE) of a fiber. So the host thread calls emu_launch_continues even if a loop of the block
 * never ends, provided that the loop takes steps. */
static inline void emu_step(emu_cpu *cpu) {
  if (--cpu->patience == 0)
    emu_rest(cpu);
}
/* Runs other threads of the block; returns when one of them has made this thread runnable again. */
void emu_yield(emu_cpu *cpu, uint32_t index);

/* Allocates the stacks for the launch's fibers; false: out of host memory. */
bool emu_fibers_prepare(emu_cpu *cpu, const emu_launch *launch);
/* Runs one block whose threads are fibers, after emu_fibers_prepare. Returns false if some threads wait for others that
 * never arrive (cpu->warps describes the waits). */
bool emu_fibers_run_block(emu_cpu *cpu, const uint32_t block[3]);
/* Ends the running block at once, from inside a kernel: no thread of the block runs on. */
_Noreturn void emu_abandon_block(ocp_emu_thread *thread);

/* ---- for kernels ---- */
/* bar.sync 0 of all threads of the block (__syncthreads). A fiber that ends without arriving at a barrier where others
 * wait is a divergence error. */
void ocp_emu_barrier(ocp_emu_thread *thread);
/* barrier.sync, .arrive and .red: mode 0 sync, 1 arrive (does not wait), 2 popc, 3 and, 4 or. `threads` is the number
 * of threads that take part; 0: all of the block. Modes 2 to 4 return the reduction of the threads' predicates. */
uint32_t ocp_emu_numbered_barrier(ocp_emu_thread *thread, uint32_t number, uint32_t threads, uint32_t mode,
                                  uint32_t predicate);
/* Executes an operation on the 64-bit mbarrier object. `operation` 0: init with `given` expected arrivals. 1: arrive
 * `given` times; returns the current phase. 2: arrive_drop, which also lowers the arrivals that later phases expect.
 * 3: test_wait; returns whether the phase `given` is complete. 4: test_wait.parity; returns whether the phase with the
 * parity `given` is complete. */
uint64_t ocp_emu_mbarrier(ocp_emu_thread *thread, void *object, uint32_t operation, uint64_t given);
/* Ends the calling thread, from any depth of calls. */
_Noreturn void ocp_emu_exit(ocp_emu_thread *thread);
/* Ends the launch with CUDA_ERROR_LAUNCH_FAILED, with `why` in the error's text. Only for kernels whose threads are
 * fibers. */
_Noreturn void ocp_emu_trap(ocp_emu_thread *thread, const char *why);
/* Ends the launch, as a trap does, after a failed assert of CUDA C++. The pointers to the texts are host addresses. */
_Noreturn void ocp_emu_assert_fail(ocp_emu_thread *thread, const char *message, const char *file, uint32_t line,
                                   const char *function);

#endif
