/* The threads of a block as fibers. Fibers switch to each other directly, in the order of their lanes, and a fiber that
 * waits is found through two levels of bit masks: a barrier of n threads costs n switches. */
#include "emu_fiber.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#elif defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

#define PAGE 4096u
#define UNKNOWN_STACK (64u << 10)
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define STACK_MARGIN (64u << 10)
#else
#define STACK_MARGIN (6u << 10) /* for libm and the functions of this file */
#endif
/* Stacks start at different cache sets: page-aligned ones would all fight for the same few lines. */
#define COLOURS 16u
#define COLOUR_BYTES 320u

enum { BARRIER = 8, SHUFFLE = 0, VOTE = 4 }; /* operations of a warp; the modes of shfl and vote are added */

#ifdef __x86_64__
/* Saves the callee-saved registers on the stack, and the stack pointer in *save; goes on where load was saved. */
void ocp_emu_switch(void **save, void *load);
void ocp_emu_fiber_start(void);
__asm__(".text\n"
        ".p2align 4\n"
        ".hidden ocp_emu_switch\n"
        ".globl ocp_emu_switch\n"
        ".type ocp_emu_switch, @function\n"
        "ocp_emu_switch:\n"
        "  pushq %rbp\n"
        "  pushq %rbx\n"
        "  pushq %r12\n"
        "  pushq %r13\n"
        "  pushq %r14\n"
        "  pushq %r15\n"
        "  movq %rsp, (%rdi)\n"
        "  movq %rsi, %rsp\n"
        "  popq %r15\n"
        "  popq %r14\n"
        "  popq %r13\n"
        "  popq %r12\n"
        "  popq %rbx\n"
        "  popq %rbp\n"
        "  popq %rcx\n"
        "  jmp *%rcx\n" /* not ret: the return predictor would always be wrong */
        ".size ocp_emu_switch, .-ocp_emu_switch\n"
        ".p2align 4\n"
        ".hidden ocp_emu_fiber_start\n"
        ".globl ocp_emu_fiber_start\n"
        ".type ocp_emu_fiber_start, @function\n"
        "ocp_emu_fiber_start:\n" /* the first switch to a fiber: rbx holds it */
        "  movq %rbx, %rdi\n"
        "  call ocp_emu_fiber_main\n"
        "  ud2\n"
        ".size ocp_emu_fiber_start, .-ocp_emu_fiber_start\n");
/* The stack is empty, and so 16-byte aligned as the ABI wants it, when fiber_start calls. */
enum { FRAME_WORDS = 7, FRAME_RBX = 4, FRAME_RETURN = 6 };
#else
/* The loader refuses every kernel on other hosts, so no fiber ever runs. */
static void ocp_emu_switch(void **save, void *load) {
  (void)save;
  (void)load;
  abort();
}
static void ocp_emu_fiber_start(void) { abort(); }
enum { FRAME_WORDS = 7, FRAME_RBX = 4, FRAME_RETURN = 6 };
#endif
__attribute__((used, visibility("hidden"))) _Noreturn void ocp_emu_fiber_main(emu_fiber *fiber);

static uint32_t stack_size(const emu_cpu *cpu) { return (uint32_t)cpu->stride - PAGE; }
static uint8_t *stack_bottom(const emu_cpu *cpu, uint32_t index) {
  return cpu->stacks + (size_t)index * cpu->stride + PAGE;
}

/* All switches go through these two, which also tell the sanitizers. */
static void switch_to(emu_cpu *cpu, emu_fiber *from, emu_fiber *to, bool ends) {
  void *ended;
#if defined(__SANITIZE_ADDRESS__)
  void *fake_stack = NULL;
  __sanitizer_start_switch_fiber(ends ? NULL : &fake_stack, stack_bottom(cpu, to->index), stack_size(cpu));
  ocp_emu_switch(ends ? &ended : &from->stack_pointer, to->stack_pointer);
  __sanitizer_finish_switch_fiber(fake_stack, NULL, NULL);
#else
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(cpu->tsan[to->index], 0);
#else
  (void)cpu;
#endif
  ocp_emu_switch(ends ? &ended : &from->stack_pointer, to->stack_pointer);
#endif
}

static _Noreturn void switch_to_main(emu_cpu *cpu) {
  void *ended;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(NULL, cpu->main_bottom, cpu->main_size);
#elif defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(cpu->main_tsan, 0);
#endif
  ocp_emu_switch(&ended, cpu->main_stack_pointer);
  __builtin_unreachable();
}

/* The fiber to run after lane `lane` of warp `warp`: first in the same warp, then in the warps after it. */
static inline emu_fiber *next_fiber(emu_cpu *cpu, uint32_t warp, uint32_t lane) {
  uint32_t runnable = cpu->warps[warp].runnable;
  if (!runnable) {
    uint32_t warps = cpu->runnable_warps;
    if (!warps)
      return NULL;
    uint32_t after = warps & ~(((uint32_t)2 << warp) - 1);
    warp = (uint32_t)__builtin_ctz(after ? after : warps);
    return &cpu->fibers[warp * EMU_WARP + (uint32_t)__builtin_ctz(cpu->warps[warp].runnable)];
  }
  uint32_t after = runnable & ~(((uint32_t)2 << lane) - 1);
  return &cpu->fibers[warp * EMU_WARP + (uint32_t)__builtin_ctz(after ? after : runnable)];
}

static inline void block_lane(emu_cpu *cpu, uint32_t warp, uint32_t lane) {
  if (!(cpu->warps[warp].runnable &= ~((uint32_t)1 << lane)))
    cpu->runnable_warps &= ~((uint32_t)1 << warp);
}

/* Some threads wait for others that never come. */
static void diverged(emu_cpu *cpu) {
  emu_check_divergence(cpu);
  atomic_store(&cpu->launch->error, CUDA_ERROR_LAUNCH_FAILED);
}

static inline void yield(emu_cpu *cpu, emu_fiber *fiber, uint32_t warp, uint32_t lane) {
  emu_fiber *next = next_fiber(cpu, warp, lane);
  if (!next) {
    diverged(cpu);
    switch_to_main(cpu);
  }
  switch_to(cpu, fiber, next, false);
}

void ocp_emu_barrier(ocp_emu_thread *thread) {
  emu_cpu *cpu = thread->scheduler;
  if (++cpu->arrived == cpu->threads) {
    cpu->arrived = 0;
    for (uint32_t warp = 0; warp < cpu->num_warps; warp++)
      cpu->warps[warp].runnable = cpu->warps[warp].live;
    cpu->runnable_warps = (uint32_t)(((uint64_t)1 << cpu->num_warps) - 1);
    return;
  }
  emu_fiber *fiber = (emu_fiber *)thread;
  uint32_t warp = fiber->index / EMU_WARP, lane = fiber->index % EMU_WARP;
  block_lane(cpu, warp, lane);
  yield(cpu, fiber, warp, lane);
}

/* ---- warp operations ---- */

static void shuffle(const emu_warp *warp, uint32_t lane, emu_lane *out) {
  const emu_lane *own = &warp->lanes[lane];
  uint32_t segment = own->clamp >> 8 & 31, clamp = own->clamp & 31, by = own->lane & 31;
  uint32_t lowest = lane & segment, highest = lowest | (clamp & ~segment & 31);
  int32_t source;
  bool inside;
  switch (own->operation - SHUFFLE) {
  case 0:
    source = (int32_t)(lowest | (by & ~segment & 31));
    inside = source <= (int32_t)highest;
    break;
  case 1:
    source = (int32_t)lane - (int32_t)by;
    inside = source >= (int32_t)highest;
    break;
  case 2:
    source = (int32_t)(lane + by);
    inside = source <= (int32_t)highest;
    break;
  default:
    source = (int32_t)(lane ^ by);
    inside = source <= (int32_t)highest;
    break;
  }
  out->predicate = inside;
  /* A source that does not take part gives an undefined value; the lane's own is one. */
  bool present = inside && (own->mask >> source & 1) && (warp->live >> source & 1);
  out->result = present ? warp->lanes[source].value : own->value;
}

/* Lets the lanes of the mask go on, with their results, when all that live have met. */
static bool complete(emu_cpu *cpu, emu_warp *warp, uint32_t lane) {
  uint32_t mask = warp->lanes[lane].mask & warp->live, operation = warp->lanes[lane].operation;
  if ((warp->meeting & mask) != mask)
    return false;
  uint32_t trues = 0;
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    uint32_t other = (uint32_t)__builtin_ctz(rest);
    const emu_lane *there = &warp->lanes[other];
    if (there->operation != operation || (there->mask & warp->live) != mask)
      return false;
    trues |= (uint32_t)(there->value != 0) << other;
  }
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    uint32_t other = (uint32_t)__builtin_ctz(rest);
    emu_lane *out = &warp->lanes[other];
    if (operation < VOTE)
      shuffle(warp, other, out);
    else if (operation < BARRIER)
      out->result = operation == VOTE + 3   ? trues
                    : operation == VOTE + 2 ? trues == 0 || trues == mask
                    : operation == VOTE + 1 ? trues != 0
                                            : trues == mask;
  }
  warp->meeting &= ~mask;
  warp->runnable |= mask;
  cpu->runnable_warps |= (uint32_t)1 << (warp - cpu->warps);
  return true;
}

static emu_lane *meet(ocp_emu_thread *thread, uint32_t mask, uint32_t operation, uint32_t value, uint32_t source,
                      uint32_t clamp) {
  emu_cpu *cpu = thread->scheduler;
  emu_fiber *fiber = (emu_fiber *)thread;
  uint32_t index = fiber->index / EMU_WARP, lane = fiber->index % EMU_WARP;
  emu_warp *warp = &cpu->warps[index];
  emu_lane *own = &warp->lanes[lane];
  own->mask = mask | (uint32_t)1 << lane;
  own->operation = operation;
  own->value = value;
  own->lane = source;
  own->clamp = clamp;
  warp->meeting |= (uint32_t)1 << lane;
  if (!complete(cpu, warp, lane)) {
    block_lane(cpu, index, lane);
    yield(cpu, fiber, index, lane);
  }
  return own;
}

void ocp_emu_warp_barrier(ocp_emu_thread *thread, uint32_t mask) { meet(thread, mask, BARRIER, 0, 0, 0); }

uint32_t ocp_emu_shfl(ocp_emu_thread *thread, uint32_t mask, uint32_t mode, uint32_t value, uint32_t lane,
                      uint32_t clamp, uint32_t *predicate) {
  const emu_lane *own = meet(thread, mask, SHUFFLE + (mode & 3), value, lane, clamp);
  if (predicate)
    *predicate = own->predicate;
  return own->result;
}

uint32_t ocp_emu_vote(ocp_emu_thread *thread, uint32_t mask, uint32_t mode, uint32_t predicate) {
  return meet(thread, mask, VOTE + (mode & 3), predicate, 0, 0)->result;
}

/* ---- start and end ---- */

void ocp_emu_fiber_main(emu_fiber *fiber) {
  emu_cpu *cpu = fiber->thread.scheduler;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(NULL, cpu->main_bottom ? NULL : &cpu->main_bottom,
                                  cpu->main_bottom ? NULL : &cpu->main_size);
#endif
  cpu->launch->function->entry(cpu->launch->params, &fiber->thread);
  uint32_t index = fiber->index / EMU_WARP, lane = fiber->index % EMU_WARP;
  emu_warp *warp = &cpu->warps[index];
  warp->live &= ~((uint32_t)1 << lane);
  block_lane(cpu, index, lane);
  cpu->live--;
  for (uint32_t rest = warp->meeting; rest; rest &= rest - 1) /* the others may have waited for this lane only */
    if (complete(cpu, warp, (uint32_t)__builtin_ctz(rest)))
      break;
  emu_fiber *next = next_fiber(cpu, index, lane);
  if (!next) {
    if (cpu->live)
      diverged(cpu);
    switch_to_main(cpu);
  }
  switch_to(cpu, fiber, next, true);
  __builtin_unreachable();
}

bool emu_fibers_prepare(emu_cpu *cpu, const emu_launch *launch) {
  uint32_t stack = launch->function->meta->stack_bytes;
  size_t need = (stack ? stack : UNKNOWN_STACK) + STACK_MARGIN + COLOURS * COLOUR_BYTES;
  size_t stride = ((need + PAGE - 1) & ~(size_t)(PAGE - 1)) + PAGE;
  if (!cpu->fibers) {
    cpu->fibers = calloc(EMU_MAX_THREADS, sizeof *cpu->fibers);
    if (!cpu->fibers)
      return false;
#if defined(__SANITIZE_THREAD__)
    for (uint32_t index = 0; index < EMU_MAX_THREADS; index++)
      cpu->tsan[index] = __tsan_create_fiber(0);
#endif
  }
  if (stride > cpu->stride) {
    size_t bytes = stride * EMU_MAX_THREADS;
    void *stacks = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED)
      return false;
    for (uint32_t index = 0; index < EMU_MAX_THREADS; index++)
      if (mprotect((uint8_t *)stacks + index * stride, PAGE, PROT_NONE)) {
        munmap(stacks, bytes);
        return false;
      }
    if (cpu->stacks)
      munmap(cpu->stacks, cpu->stacks_bytes);
    cpu->stacks = stacks;
    cpu->stacks_bytes = bytes;
    cpu->stride = stride;
  }
  cpu->num_warps = (launch->threads + EMU_WARP - 1) / EMU_WARP;
  cpu->threads = launch->threads;
  for (uint32_t index = 0; index < launch->threads; index++) {
    emu_fiber *fiber = &cpu->fibers[index];
    ocp_emu_thread *thread = &fiber->thread;
    fiber->index = index;
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

void emu_fibers_run_block(emu_cpu *cpu, const uint32_t block[3]) {
  uint32_t threads = cpu->threads;
  for (uint32_t index = 0; index < threads; index++) {
    emu_fiber *fiber = &cpu->fibers[index];
    memcpy(fiber->thread.ctaid, block, sizeof fiber->thread.ctaid);
#if defined(__SANITIZE_ADDRESS__)
    /* The last fiber on this stack never returned from its frames. */
    __asan_unpoison_memory_region(stack_bottom(cpu, index), stack_size(cpu));
#endif
    void **frame = (void **)(stack_bottom(cpu, index) + stack_size(cpu) - index % COLOURS * COLOUR_BYTES) - FRAME_WORDS;
    frame[FRAME_RBX] = fiber;
    frame[FRAME_RETURN] = (void *)ocp_emu_fiber_start;
    fiber->stack_pointer = frame;
  }
  for (uint32_t warp = 0; warp < cpu->num_warps; warp++) {
    uint32_t lanes = threads - warp * EMU_WARP;
    cpu->warps[warp].live = cpu->warps[warp].runnable = lanes >= EMU_WARP ? UINT32_MAX : ((uint32_t)1 << lanes) - 1;
    cpu->warps[warp].meeting = 0;
  }
  cpu->runnable_warps = (uint32_t)(((uint64_t)1 << cpu->num_warps) - 1);
  cpu->live = threads;
  cpu->arrived = 0;
#if defined(__SANITIZE_ADDRESS__)
  void *fake_stack = NULL;
  cpu->main_bottom = NULL;
  __sanitizer_start_switch_fiber(&fake_stack, stack_bottom(cpu, 0), stack_size(cpu));
  ocp_emu_switch(&cpu->main_stack_pointer, cpu->fibers[0].stack_pointer);
  __sanitizer_finish_switch_fiber(fake_stack, NULL, NULL);
#elif defined(__SANITIZE_THREAD__)
  cpu->main_tsan = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(cpu->tsan[0], 0);
  ocp_emu_switch(&cpu->main_stack_pointer, cpu->fibers[0].stack_pointer);
#else
  ocp_emu_switch(&cpu->main_stack_pointer, cpu->fibers[0].stack_pointer);
#endif
}

void emu_abandon_block(ocp_emu_thread *thread) {
  emu_cpu *cpu = thread->scheduler;
  if (cpu->launch->function->meta->mode == OCP_EMU_FIBER)
    switch_to_main(cpu);
  longjmp(cpu->abandon, 1);
}
