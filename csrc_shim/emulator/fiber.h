/* The threads of a block as fibers of one host thread, and the host thread's means to run blocks. */
#ifndef OCP_EMULATOR_FIBER_H
#define OCP_EMULATOR_FIBER_H

#include <setjmp.h>

#include "emulator/kernel.h"
#include "emulator/launch.h"
#include "emulator/state.h"

typedef struct emu_fiber {
  ocp_emu_thread thread; /* first: kernels know a fiber by it */
  void *stack_pointer;   /* while it does not run */
  uint32_t index;        /* linear index of the thread in its block */
} emu_fiber;

/* What a lane waits for in a warp operation. */
typedef struct emu_meeting {
  uint32_t mask;      /* the lanes that take part */
  uint32_t operation; /* lanes meet only at the same one */
  uint32_t source, clamp;
} emu_meeting;

typedef struct emu_warp {
  uint32_t live;       /* lanes that have not ended */
  uint32_t runnable;   /* lanes that wait for nothing */
  uint32_t meeting;    /* lanes that wait in a warp operation */
  bool ragged;         /* they do not all wait for the same: each has its entry in lanes */
  emu_meeting uniform; /* what they wait for otherwise */
  uint32_t predicates; /* of the results */
  uint32_t value[EMU_WARP], result[EMU_WARP];
  emu_meeting lanes[EMU_WARP];
} emu_warp;

/* What one host thread needs to run blocks, lent for the time of a launch. There are as many as `emu.threads`: more
 * host threads than that take turns. */
typedef struct emu_cpu {
  emu_launch *launch;
  uint8_t *shared;  /* EMU_MAX_SHARED bytes, then a page that faults on every access */
  uint8_t *written; /* checking mode: for each byte of shared memory whether the block has written it */
  jmp_buf abandon;  /* checking and counting modes: where a kernel without fibers is left */
  uint32_t current; /* the thread that runs */
  uint32_t started; /* threads below have a stack in use */
  uint32_t threads, live, arrived, runnable_warps, num_warps;
  uint32_t block_index[3];
  void *main_stack_pointer;
  emu_fiber *fibers;
  uint8_t *stacks;
  size_t stacks_bytes, stack_size; /* of all stacks with their guard pages, and of one stack */
  emu_warp warps[EMU_MAX_WARPS];
  struct emu_cpu *next; /* list of those not in use */
#if defined(__SANITIZE_ADDRESS__)
  void *main_fake_stack;
  const void *main_bottom;
  size_t main_size;
#elif defined(__SANITIZE_THREAD__)
  void *main_tsan, *tsan[EMU_MAX_THREADS];
#endif
} emu_cpu;

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
/* After a lane has ended: makes the lanes runnable that waited for this lane only. */
void emu_warp_lane_ended(emu_cpu *cpu, emu_warp *warp);

/* Makes sure of stacks for the launch's fibers; false: out of host memory. */
bool emu_fibers_prepare(emu_cpu *cpu, const emu_launch *launch);
/* Runs one block whose threads are fibers; the fields of cpu->fibers that stay the same in a launch are set. */
void emu_fibers_run_block(emu_cpu *cpu, const uint32_t block[3]);
/* Leaves the running block at once, from inside a kernel. */
_Noreturn void emu_abandon_block(ocp_emu_thread *thread);

#endif
