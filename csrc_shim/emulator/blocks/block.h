/* Running kernels: a launch, the threads of a block as fibers of one host thread, and what a host thread needs to run
 * blocks. Types only. */
#ifndef OCP_EMULATOR_BLOCKS_BLOCK_H
#define OCP_EMULATOR_BLOCKS_BLOCK_H

#include <setjmp.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "driver/driver.h"
#include "emulator/clock.h"
#include "emulator/kernel.h"
#include "emulator/state.h"

/* A running launch. */
typedef struct emu_launch {
  const struct CUfunc_st *function;
  const void *const *params;
  uint32_t grid[3], block[3];
  uint32_t threads; /* of a block */
  uint32_t dynamic_shared;
  uint64_t blocks;
  emu_device *device;
  const emu_clock *clock;
  _Atomic int error;
  _Atomic unsigned found; /* kinds of findings */
} emu_launch;

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
  bool diverged; /* threads of the block wait for others that never come */
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

#endif
