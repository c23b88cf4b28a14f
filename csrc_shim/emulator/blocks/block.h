/* State of running kernels: a launch, the threads of a block as fibers of one host thread, and the resources of a host
 * thread that runs blocks. Types only. */
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
  uint32_t threads; /* threads per block */
  uint32_t dynamic_shared;
  uint64_t blocks;
  emu_device *device;
  const emu_clock *clock;
  _Atomic int error;
  _Atomic unsigned found; /* bit mask of the kinds of findings so far */
  _Atomic int finding;    /* index of the latest finding that was kept, plus 1; 0: no finding was kept */
  /* Checking mode, used by global_order.c. `serial`: number of the launch. `now`: counts the fences and ordered
   * accesses of the launch. `released`: 2 * blocks values of `now`, at the last release of each block, then at the last
   * acquire of each block; NULL: order between blocks is not checked. */
  uint32_t serial;
  _Atomic uint32_t now, *released;
  /* For a launch that may never end. `watched`: time of the first emu_launch_continues in nanoseconds; 0: not called
   * yet. `interrupts`: number of counted SIGINTs when the launch was reported as slow, plus 1; 0: not reported yet.
   * `is_slow`: whether a thread has reported the launch as slow, or is about to. */
  _Atomic uint64_t watched;
  _Atomic uint32_t interrupts;
  atomic_bool is_slow;
} emu_launch;
/* Number of steps (barriers, warp operations, checked accesses, blocks) after which a host thread calls
 * emu_launch_continues. */
enum { EMU_PATIENCE = 1024 };

/* Checking mode: the local memory of one function of a thread, `bytes` bytes at `start`. `bytes` shadow bytes follow
 * it: shadow byte i is 1 if byte i of the local memory has been written, else 0. */
typedef struct emu_local {
  uint8_t *start;
  uint32_t bytes;
} emu_local;
enum { EMU_MAX_LOCALS = 8 }; /* maximum number of functions per thread whose local memory is checked */

typedef struct emu_fiber {
  ocp_emu_thread thread; /* first member: kernels identify a fiber by it */
  void *stack_pointer;   /* saved while the fiber does not run */
  uint32_t index;        /* linear index of the thread in its block */
  uint32_t num_locals;
  emu_local locals[EMU_MAX_LOCALS];
} emu_fiber;

/* Checking mode: a store to memory that another block (number `other`) has stored to, with no order between the two
 * stores. It is a race only if it changes a byte, which is known after the store: emu_global_settle compares the memory
 * with `before`. If `bytes` is 0, there is no such store. */
typedef struct emu_doubt {
  ocp_emu_thread thread;
  uint64_t address;
  uint32_t bytes, other;
  uint8_t before[16];
} emu_doubt;

/* Values of emu_meeting.operation. The mode of a shfl, vote, match or redux is added to its value. */
enum {
  EMU_SHUFFLE = 0,
  EMU_VOTE = 4,
  EMU_BARRIER = 8,
  EMU_MATCH = 9,
  EMU_REDUCE = 11,
  EMU_MULTIPLY = 19,
  EMU_LOAD_MATRIX,
  EMU_STORE_MATRIX
};

/* A lane's registers in a matrix operation, and the address of the row in memory that it loads or stores. */
typedef struct emu_fragments {
  const uint32_t *a, *b, *c;
  uint32_t *d;
  void *row;
} emu_fragments;

/* The arguments with which one lane calls a warp operation, in which lanes wait for each other. */
typedef struct emu_meeting {
  uint32_t mask;          /* the lanes that take part */
  uint32_t operation;     /* EMU_SHUFFLE to EMU_STORE_MATRIX; lanes wait for each other only in the same operation */
  uint32_t source, clamp; /* shfl: `lane` and `clamp`; mma: `form`; ldmatrix and stmatrix: `count` and `transposed`
                             (warp.h) */
} emu_meeting;

typedef struct emu_warp {
  uint32_t live;       /* lanes that have not ended */
  uint32_t runnable;   /* lanes that can run */
  uint32_t meeting;    /* lanes that wait in a warp operation */
  bool ragged;         /* true: lanes wait in different operations, described in lanes */
  emu_meeting uniform; /* the operation that all waiting lanes share, unless ragged */
  uint32_t predicates; /* results: bit mask of the predicates that the operation returns to the lanes */
  uint32_t value[EMU_WARP], result[EMU_WARP];
  emu_meeting lanes[EMU_WARP];
  const emu_fragments *fragments[EMU_WARP];
} emu_warp;

/* The largest m, n and k of an mma instruction. */
enum { EMU_MATRIX_ROWS = 16, EMU_MATRIX_COLUMNS = 8, EMU_MATRIX_DEPTH = 256 };

/* A named barrier of the block (barrier.sync with a number), or a barrier that reduces a predicate. A plain
 * __syncthreads counts in emu_cpu.arrived instead. */
enum { EMU_BARRIERS = 16 };
typedef struct emu_barrier {
  uint32_t expected, arrived; /* threads of the current phase; expected 0: no phase has begun */
  uint32_t trues;             /* arrived threads whose predicate holds */
  uint32_t waiting[EMU_MAX_WARPS], present[EMU_MAX_WARPS]; /* lanes that wait, and all that have arrived */
} emu_barrier;

/* State of a byte of shared memory in the checking mode: unwritten, written, or the target of a pending cp.async (its
 * thread has not waited for it). */
enum emu_byte_of_block { EMU_BLOCK_UNWRITTEN, EMU_BLOCK_WRITTEN, EMU_BLOCK_PENDING };

/* The resources that a host thread needs to run blocks; it borrows them for the duration of a launch. There are at most
 * `emu.threads` of these structs; further host threads wait until one is free. */
typedef struct emu_cpu {
  emu_launch *launch;
  uint8_t *shared;         /* EMU_MAX_SHARED bytes, between two pages that fault on every access */
  uint8_t *written;        /* checking mode: for each byte of shared memory an emu_byte_of_block */
  struct emu_races *races; /* checking mode: the last accesses to shared memory, and the barriers that order them */
  emu_doubt doubt;
  jmp_buf abandon;  /* checking and counting modes: longjmp target that abandons a block run without fibers */
  uint32_t current; /* index of the running thread */
  uint32_t started; /* threads below this index have a stack in use */
  uint32_t threads, live, arrived, runnable_warps, num_warps;
  bool diverged;     /* some threads of the block wait for others that never arrive */
  bool rests;        /* the current fiber lets emu_fibers_run_block call emu_launch_continues */
  uint32_t patience; /* steps until the next emu_launch_continues */
  uint32_t block_index[3];
  void *main_stack_pointer;
  emu_fiber *fibers;
  uint8_t *stacks;
  size_t stacks_bytes, stack_size; /* bytes of all stacks with their guard pages, and of one stack */
  emu_warp warps[EMU_MAX_WARPS];
  emu_barrier barriers[EMU_BARRIERS];
  _Alignas(8) uint32_t elements[(EMU_MATRIX_ROWS + EMU_MATRIX_COLUMNS) * EMU_MATRIX_DEPTH]; /* a and b of an mma */
  struct emu_cpu *next;                                                                     /* free list */
#if defined(__SANITIZE_ADDRESS__)
  void *main_fake_stack;
  const void *main_bottom;
  size_t main_size;
#elif defined(__SANITIZE_THREAD__)
  void *main_tsan, *tsan[EMU_MAX_THREADS];
#endif
} emu_cpu;

#endif
