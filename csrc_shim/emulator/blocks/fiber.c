/* The threads of a block as fibers. A fiber that waits switches directly to the next runnable one in lane order, which
 * two levels of bit masks find (warps of the block, lanes of a warp): a barrier of n threads costs n switches. */
#include "emulator/blocks/fiber.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "driver/driver.h"
#include "emulator/blocks/meeting.h"
#include "emulator/blocks/order.h"
#include "emulator/findings.h"
#include "emulator/host/cpu.h"
#include "emulator/host/stack_switch.h"
#include "emulator/module.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#elif defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

#define UNKNOWN_STACK (64u << 10)
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define STACK_MARGIN (64u << 10)
#else
#define STACK_MARGIN (6u << 10) /* stack bytes for libm and the functions of this file */
#endif
/* The tops of the stacks are staggered over 16 cache sets: page-aligned tops would all map to the same few sets. */
#define COLORS 16u
#define COLOR_BYTES 320u

_Thread_local __attribute__((tls_model("initial-exec"))) emu_cpu *emu_running;

/* Returns the size in bytes of a warp's stacks with their guard page. A process may have about 65,000 mappings, and
 * each guard page adds two. So a warp has one guard page, below the stack of its first thread: the threads of a warp
 * run the same code, so a stack overflow hits the guard page in the first thread. */
static size_t warp_bytes(size_t stack_size) { return EMU_PAGE + EMU_WARP * stack_size; }
static uint8_t *stack_bottom(const emu_cpu *cpu, uint32_t index) {
  return cpu->stacks + index / EMU_WARP * warp_bytes(cpu->stack_size) + EMU_PAGE + index % EMU_WARP * cpu->stack_size;
}
static void *stack_top(const emu_cpu *cpu, uint32_t index) {
  return stack_bottom(cpu, index) + cpu->stack_size - index % COLORS * COLOR_BYTES;
}

/* Saves the stack pointer in *save (NULL: the fiber has ended) and runs thread `next`. */
static inline void switch_to(emu_cpu *cpu, void **save, uint32_t next) {
  emu_fiber *fiber = &cpu->fibers[next];
  cpu->current = next;
#if defined(__SANITIZE_ADDRESS__)
  void *fake_stack = NULL;
  if (next >= cpu->started) /* the previous fiber on this stack never returned from its frames */
    __asan_unpoison_memory_region(stack_bottom(cpu, next), cpu->stack_size);
  __sanitizer_start_switch_fiber(save ? &fake_stack : NULL, stack_bottom(cpu, next), cpu->stack_size);
#elif defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(cpu->tsan[next], 0);
#endif
  void *ended;
  if (next >= cpu->started) { /* threads start in index order */
    cpu->started = next + 1;
    ocp_emu_switch_new(save ? save : &ended, stack_top(cpu, next), fiber);
  } else if (save) {
    ocp_emu_switch(save, fiber->stack_pointer);
  } else {
    ocp_emu_switch_last(fiber->stack_pointer);
  }
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack, NULL, NULL);
#endif
}

static _Noreturn void switch_to_main(emu_cpu *cpu) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(NULL, cpu->main_bottom, cpu->main_size);
#elif defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(cpu->main_tsan, 0);
#endif
  ocp_emu_switch_last(cpu->main_stack_pointer);
}

void emu_rest(emu_cpu *cpu) {
  cpu->rests = true;
#if defined(__SANITIZE_ADDRESS__)
  void *fake_stack = NULL;
  __sanitizer_start_switch_fiber(&fake_stack, cpu->main_bottom, cpu->main_size);
#elif defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(cpu->main_tsan, 0);
#endif
  ocp_emu_switch(&cpu->fibers[cpu->current].stack_pointer, cpu->main_stack_pointer);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack, NULL, NULL);
#endif
}

#define NONE UINT32_MAX

/* Returns the thread to run after `index`: the next one of the same warp, else one of the following warps. */
static inline uint32_t next_thread(const emu_cpu *cpu, uint32_t index) {
  uint32_t warp = index / EMU_WARP, runnable = cpu->warps[warp].runnable;
  if (!runnable) {
    uint32_t warps = cpu->runnable_warps;
    if (!warps)
      return NONE;
    uint32_t after = warps & ~(((uint32_t)2 << warp) - 1);
    warp = (uint32_t)__builtin_ctz(after ? after : warps);
    return warp * EMU_WARP + (uint32_t)__builtin_ctz(cpu->warps[warp].runnable);
  }
  uint32_t after = runnable & ~(((uint32_t)2 << index % EMU_WARP) - 1);
  return warp * EMU_WARP + (uint32_t)__builtin_ctz(after ? after : runnable);
}

/* Leaves the block because some threads wait for others that never arrive. */
static _Noreturn void diverged(emu_cpu *cpu) {
  cpu->diverged = true;
  switch_to_main(cpu);
}

static inline void yield(emu_cpu *cpu, uint32_t index) {
  uint32_t next = next_thread(cpu, index);
  if (next == NONE)
    diverged(cpu);
  switch_to(cpu, &cpu->fibers[index].stack_pointer, next);
}

void emu_yield(emu_cpu *cpu, uint32_t index) { yield(cpu, index); }

void ocp_emu_barrier(ocp_emu_thread *thread) {
  (void)thread;
  emu_cpu *cpu = emu_running;
  if (++cpu->arrived == cpu->threads) {
    cpu->arrived = 0;
    emu_order_barrier(cpu);
    for (uint32_t warp = 0; warp < cpu->num_warps; warp++)
      cpu->warps[warp].runnable = cpu->warps[warp].live;
    cpu->runnable_warps = (uint32_t)(((uint64_t)1 << cpu->num_warps) - 1);
    emu_step(cpu);
    return;
  }
  uint32_t index = cpu->current;
  emu_block_thread(cpu, index);
  yield(cpu, index);
}

/* ---- named barriers ---- */

enum { EMU_ARRIVE = 1, EMU_POPC = 2, EMU_AND = 3 };

static uint32_t reduced(const emu_barrier *barrier, uint32_t mode) {
  if (mode == EMU_POPC)
    return barrier->trues;
  return mode == EMU_AND ? barrier->trues == barrier->arrived : barrier->trues != 0;
}

/* Makes the waiting threads runnable, gives each the result, and begins the barrier's next phase. */
static void complete(emu_cpu *cpu, emu_barrier *barrier, uint32_t result) {
  emu_order_numbered_barrier(cpu, barrier->present, barrier->waiting);
  for (uint32_t warp = 0; warp < cpu->num_warps; warp++) {
    for (uint32_t rest = barrier->waiting[warp]; rest; rest &= rest - 1)
      cpu->warps[warp].result[__builtin_ctz(rest)] = result;
    cpu->warps[warp].runnable |= barrier->waiting[warp];
    cpu->runnable_warps |= (uint32_t)(barrier->waiting[warp] != 0) << warp;
  }
  memset(barrier, 0, sizeof *barrier);
}

uint32_t ocp_emu_numbered_barrier(ocp_emu_thread *thread, uint32_t number, uint32_t threads, uint32_t mode,
                                  uint32_t predicate) {
  emu_cpu *cpu = emu_running;
  emu_barrier *barrier = &cpu->barriers[number % EMU_BARRIERS];
  uint32_t index = cpu->current, warp = index / EMU_WARP, lane = index % EMU_WARP;
  uint32_t expected = threads && threads < cpu->threads ? threads : cpu->threads;
  if (threads > cpu->num_warps * EMU_WARP)
    ocp_emu_trap(thread, "a barrier waits for more threads than the block has");
  if (barrier->expected && barrier->expected != expected)
    ocp_emu_trap(thread, "threads wait at one barrier with different thread counts");
  barrier->expected = expected;
  barrier->arrived++;
  barrier->trues += predicate != 0;
  barrier->present[warp] |= (uint32_t)1 << lane;
  if (barrier->arrived == expected) {
    uint32_t result = reduced(barrier, mode);
    barrier->waiting[warp] |= mode == EMU_ARRIVE ? 0 : (uint32_t)1 << lane;
    complete(cpu, barrier, result);
    emu_step(cpu);
    return result;
  }
  if (mode == EMU_ARRIVE)
    return 0;
  barrier->waiting[warp] |= (uint32_t)1 << lane;
  emu_block_thread(cpu, index);
  yield(cpu, index);
  return cpu->warps[warp].result[lane];
}

/* ---- mbarrier objects ---- */

enum { EMU_INIT, EMU_ARRIVE_AT, EMU_DROP, EMU_TEST, EMU_TEST_PARITY };

/* State of an mbarrier object in shared memory, 64 bits. */
typedef struct mbarrier {
  uint32_t pending : 20; /* arrivals that the phase still expects */
  uint32_t unused : 12;
  uint32_t expected : 20; /* arrivals that the next phase will expect */
  uint32_t phase : 12;
} mbarrier;

/* Lets other threads run while this one polls: the rest of its warp, then the other warps. */
static void let_others_run(emu_cpu *cpu, uint32_t index) {
  uint32_t warp = index / EMU_WARP, lanes = cpu->warps[warp].runnable, warps = cpu->runnable_warps;
  uint32_t after = lanes & ~(((uint32_t)2 << index % EMU_WARP) - 1);
  if (!after) {
    uint32_t later = warps & ~(((uint32_t)2 << warp) - 1);
    warp = (uint32_t)__builtin_ctz(later ? later : warps);
    after = cpu->warps[warp].runnable;
  }
  uint32_t next = warp * EMU_WARP + (uint32_t)__builtin_ctz(after);
  if (next != index)
    switch_to(cpu, &cpu->fibers[index].stack_pointer, next);
}

uint64_t ocp_emu_mbarrier(ocp_emu_thread *thread, void *object, uint32_t operation, uint64_t given) {
  mbarrier state;
  memcpy(&state, object, sizeof state);
  uint64_t token = state.phase;
  switch (operation) {
  case EMU_INIT:
    state = (mbarrier){.pending = (uint32_t)given, .expected = (uint32_t)given};
    break;
  case EMU_TEST:
  case EMU_TEST_PARITY:
    if (operation == EMU_TEST ? token != given : (token & 1) != given) {
      emu_order_fence(thread, true, false);
      return 1;
    }
    emu_step(emu_running);
    let_others_run(emu_running, emu_running->current);
    return 0;
  default:
    if (given > state.pending)
      ocp_emu_trap(thread, "more threads arrive at an mbarrier than its phase expects");
    emu_order_fence(thread, false, true);
    state.pending -= (uint32_t)given;
    state.expected -= operation == EMU_DROP ? (uint32_t)given : 0;
    if (!state.pending) {
      state.pending = state.expected;
      state.phase++;
    }
  }
  memcpy(object, &state, sizeof state);
  return token;
}

/* ---- start and end ---- */

/* Ends a thread and runs another one; the last thread of the block returns to emu_fibers_run_block. */
static _Noreturn void end_thread(emu_cpu *cpu, uint32_t index) {
  emu_warp *warp = &cpu->warps[index / EMU_WARP];
  warp->live &= ~((uint32_t)1 << index % EMU_WARP);
  emu_block_thread(cpu, index);
  if (warp->meeting)
    emu_warp_lane_ended(cpu, warp);
  uint32_t next = next_thread(cpu, index);
  if (--cpu->live == 0)
    switch_to_main(cpu);
  if (next == NONE)
    diverged(cpu);
  switch_to(cpu, NULL, next);
  __builtin_unreachable();
}

/* First function of a new fiber; ocp_emu_switch_new calls it by its name. */
__attribute__((used, visibility("hidden"))) _Noreturn void ocp_emu_fiber_main(void *started);
void ocp_emu_fiber_main(void *started) {
  emu_fiber *fiber = started;
  emu_cpu *cpu = emu_running;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(NULL, cpu->main_bottom ? NULL : &cpu->main_bottom,
                                  cpu->main_bottom ? NULL : &cpu->main_size);
#endif
  memcpy(fiber->thread.ctaid, cpu->block_index, sizeof cpu->block_index);
  fiber->num_locals = 0;
  cpu->launch->function->entry(cpu->launch->params, &fiber->thread);
  end_thread(cpu, fiber->index);
}

_Noreturn void ocp_emu_exit(ocp_emu_thread *thread) {
  emu_fiber *fiber = (emu_fiber *)thread;
  end_thread(thread->scheduler, fiber->index);
}

bool emu_fibers_prepare(emu_cpu *cpu, const emu_launch *launch) {
  uint32_t stack = launch->function->meta->stack_bytes;
  size_t need = (stack ? stack : UNKNOWN_STACK) + STACK_MARGIN + COLORS * COLOR_BYTES;
  size_t size = (need + EMU_PAGE - 1) & ~(size_t)(EMU_PAGE - 1);
  if (!cpu->fibers) {
    cpu->fibers = calloc(EMU_MAX_THREADS, sizeof *cpu->fibers);
    if (!cpu->fibers)
      return false;
  }
  if (size > cpu->stack_size) {
    size_t bytes = EMU_MAX_WARPS * warp_bytes(size);
    void *stacks = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED)
      return false;
    for (uint32_t warp = 0; warp < EMU_MAX_WARPS; warp++)
      if (mprotect((uint8_t *)stacks + warp * warp_bytes(size), EMU_PAGE, PROT_NONE)) {
        munmap(stacks, bytes);
        return false;
      }
    if (cpu->stacks)
      munmap(cpu->stacks, cpu->stacks_bytes);
    cpu->stacks = stacks;
    cpu->stacks_bytes = bytes;
    cpu->stack_size = size;
  }
  cpu->num_warps = (launch->threads + EMU_WARP - 1) / EMU_WARP;
  cpu->threads = launch->threads;
  for (uint32_t index = 0; index < launch->threads; index++) {
    emu_fiber *fiber = &cpu->fibers[index];
    ocp_emu_thread *thread = &fiber->thread;
    fiber->index = index;
#if defined(__SANITIZE_THREAD__)
    if (!cpu->tsan[index])
      cpu->tsan[index] = __tsan_create_fiber(0);
#endif
    thread->tid[0] = index % launch->block[0];
    thread->tid[1] = index / launch->block[0] % launch->block[1];
    thread->tid[2] = index / launch->block[0] / launch->block[1];
    memcpy(thread->ntid, launch->block, sizeof thread->ntid);
    memcpy(thread->nctaid, launch->grid, sizeof thread->nctaid);
    thread->laneid = index % EMU_WARP;
    thread->dynamic_shared = launch->dynamic_shared;
    thread->shared = cpu->shared;
    thread->scheduler = cpu;
  }
  return true;
}

bool emu_fibers_run_block(emu_cpu *cpu, const uint32_t block[3]) {
  uint32_t threads = cpu->threads;
  memcpy(cpu->block_index, block, sizeof cpu->block_index);
  for (uint32_t warp = 0; warp < cpu->num_warps; warp++) {
    uint32_t lanes = threads - warp * EMU_WARP;
    cpu->warps[warp].live = cpu->warps[warp].runnable = lanes >= EMU_WARP ? UINT32_MAX : ((uint32_t)1 << lanes) - 1;
    cpu->warps[warp].meeting = 0;
  }
  cpu->runnable_warps = (uint32_t)(((uint64_t)1 << cpu->num_warps) - 1);
  cpu->live = threads;
  cpu->arrived = 0;
  memset(cpu->barriers, 0, sizeof cpu->barriers);
  cpu->started = 0;
  cpu->diverged = cpu->rests = false;
  emu_running = cpu;
#if defined(__SANITIZE_ADDRESS__)
  cpu->main_bottom = NULL;
#elif defined(__SANITIZE_THREAD__)
  cpu->main_tsan = __tsan_get_current_fiber();
#endif
  switch_to(cpu, &cpu->main_stack_pointer, 0);
  while (cpu->rests) {
    cpu->rests = false;
    if (!emu_launch_continues(cpu, block))
      break;
    switch_to(cpu, &cpu->main_stack_pointer, cpu->current);
  }
  return !cpu->diverged;
}

void emu_abandon_block(ocp_emu_thread *thread) {
  emu_cpu *cpu = thread->scheduler;
  if (cpu->launch->function->meta->mode == OCP_EMU_FIBER)
    switch_to_main(cpu);
  longjmp(cpu->abandon, 1);
}

_Noreturn void ocp_emu_trap(ocp_emu_thread *thread, const char *why) {
  const emu_cpu *cpu = thread->scheduler;
  emu_launch *launch = cpu->launch;
  int none = CUDA_SUCCESS;
  if (atomic_compare_exchange_strong(&launch->error, &none, CUDA_ERROR_LAUNCH_FAILED)) {
    char text[EMU_FINDING_BYTES];
    snprintf(text, sizeof text, "trap: kernel %s, block (%u,%u,%u), thread (%u,%u,%u): %s", launch->function->name,
             thread->ctaid[0], thread->ctaid[1], thread->ctaid[2], thread->tid[0], thread->tid[1], thread->tid[2], why);
    emu_order_keep(launch, text);
  }
  emu_abandon_block(thread);
}

_Noreturn void ocp_emu_assert_fail(ocp_emu_thread *thread, const char *message, const char *file, uint32_t line,
                                   const char *function) {
  char text[EMU_FINDING_BYTES];
  snprintf(text, sizeof text, "%s:%u: %s: assertion `%s` failed", file, line, function, message);
  ocp_emu_trap(thread, text);
}
