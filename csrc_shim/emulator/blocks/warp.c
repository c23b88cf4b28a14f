/* The warp operations that kernels call: barriers of a mask, shuffles and votes. */
#include "emulator/blocks/warp.h"

#include "emulator/blocks/fiber.h"
#include "emulator/blocks/meeting.h"
#include "emulator/state.h"

static bool same(const emu_meeting *a, const emu_meeting *b) {
  return a->mask == b->mask && a->operation == b->operation && a->source == b->source && a->clamp == b->clamp;
}

/* Waits for the other lanes; the returned warp then holds the results for the calling lane. */
static inline emu_warp *meet(emu_meeting meeting, uint32_t value, uint32_t *own) {
  emu_cpu *cpu = emu_running;
  uint32_t index = cpu->current, lane = index % EMU_WARP;
  emu_warp *warp = &cpu->warps[index / EMU_WARP];
  meeting.mask |= (uint32_t)1 << lane;
  if (!warp->meeting) {
    warp->ragged = false;
    warp->uniform = meeting;
  } else if (!warp->ragged && !same(&warp->uniform, &meeting)) {
    warp->ragged = true;
    for (uint32_t rest = warp->meeting; rest; rest &= rest - 1)
      warp->lanes[__builtin_ctz(rest)] = warp->uniform;
  }
  if (warp->ragged)
    warp->lanes[lane] = meeting;
  warp->value[lane] = value;
  warp->meeting |= (uint32_t)1 << lane;
  if (!emu_warp_complete(cpu, warp, lane)) {
    emu_block_thread(cpu, index);
    emu_yield(cpu, index);
  }
  *own = lane;
  return warp;
}

void ocp_emu_warp_barrier(ocp_emu_thread *thread, uint32_t mask) {
  (void)thread;
  uint32_t lane;
  meet((emu_meeting){mask, EMU_BARRIER, 0, 0}, 0, &lane);
}

uint32_t ocp_emu_shfl(ocp_emu_thread *thread, uint32_t mask, uint32_t mode, uint32_t value, uint32_t lane,
                      uint32_t clamp, uint32_t *predicate) {
  (void)thread;
  uint32_t own;
  const emu_warp *warp = meet((emu_meeting){mask, EMU_SHUFFLE + (mode & 3), lane, clamp}, value, &own);
  if (predicate)
    *predicate = warp->predicates >> own & 1;
  return warp->result[own];
}

uint32_t ocp_emu_vote(ocp_emu_thread *thread, uint32_t mask, uint32_t mode, uint32_t predicate) {
  (void)thread;
  uint32_t own;
  return meet((emu_meeting){mask, EMU_VOTE + (mode & 3), 0, 0}, predicate, &own)->result[own];
}
