#include "emulator/blocks/barrier.h"

#include <string.h>

#include "emulator/blocks/fiber.h"

enum { EMU_ARRIVE = 1, EMU_POPC = 2, EMU_AND = 3 };

static uint32_t reduced(const emu_barrier *barrier, uint32_t mode) {
  if (mode == EMU_POPC)
    return barrier->trues;
  return mode == EMU_AND ? barrier->trues == barrier->arrived : barrier->trues != 0;
}

/* Makes the waiting threads runnable, and gives each the result. The next phase begins. */
static void complete(emu_cpu *cpu, emu_barrier *barrier, uint32_t result) {
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
    ocp_emu_trap(thread, "threads name different counts for one barrier");
  barrier->expected = expected;
  barrier->arrived++;
  barrier->trues += predicate != 0;
  if (barrier->arrived == expected) {
    uint32_t result = reduced(barrier, mode);
    complete(cpu, barrier, result);
    return result;
  }
  if (mode == EMU_ARRIVE)
    return 0;
  barrier->waiting[warp] |= (uint32_t)1 << lane;
  emu_block_thread(cpu, index);
  emu_yield(cpu, index);
  return cpu->warps[warp].result[lane];
}
