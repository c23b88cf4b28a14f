/* Warp operations: barriers of a mask, shuffles and votes. The lane that comes last computes the results of all. */
#include "emulator/fiber.h"
#include "emulator/kernel.h"
#include "emulator/state.h"

enum { SHUFFLE = 0, VOTE = 4, BARRIER = 8 }; /* operations; the modes of shfl and vote are added */

/* shfl.sync of the PTX ISA: the lane that `lane` reads from, or -1 where the predicate is false. */
static inline int source_of(uint32_t lane, const emu_meeting *meeting) {
  uint32_t segment = meeting->clamp >> 8 & 31, clamp = meeting->clamp & 31, by = meeting->source & 31;
  int lowest = (int)(lane & segment), highest = lowest | (int)(clamp & ~segment & 31), source;
  switch (meeting->operation - SHUFFLE) {
  case 0:
    source = lowest | (int)(by & ~segment & 31);
    break;
  case 1:
    source = (int)lane - (int)by;
    return source >= highest ? source : -1;
  case 2:
    source = (int)(lane + by);
    break;
  default:
    source = (int)(lane ^ by);
    break;
  }
  return source <= highest ? source : -1;
}

/* A source that does not take part gives an undefined value; the lane's own is one. */
static inline void shuffle(emu_warp *warp, uint32_t lane, const emu_meeting *meeting, uint32_t present) {
  int source = source_of(lane, meeting);
  warp->result[lane] = source >= 0 && (present >> source & 1) ? warp->value[source] : warp->value[lane];
  warp->predicates = (warp->predicates & ~((uint32_t)1 << lane)) | (uint32_t)(source >= 0) << lane;
}

static uint32_t vote(const emu_warp *warp, uint32_t mode, uint32_t mask) {
  uint32_t trues = 0;
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    uint32_t lane = (uint32_t)__builtin_ctz(rest);
    trues |= (uint32_t)(warp->value[lane] != 0) << lane;
  }
  switch (mode) {
  case 0:
    return trues == mask;
  case 1:
    return trues != 0;
  case 2:
    return trues == 0 || trues == mask;
  default:
    return trues;
  }
}

static const emu_meeting *meeting_of(const emu_warp *warp, uint32_t lane) {
  return warp->ragged ? &warp->lanes[lane] : &warp->uniform;
}

/* The butterflies of reductions over whole warps, which are most shuffles. */
static bool whole_butterfly(const emu_warp *warp, const emu_meeting *meeting, uint32_t mask) {
  return mask == UINT32_MAX && meeting->operation == SHUFFLE + 3 && !warp->ragged && meeting->clamp == 31;
}

/* Lets the lanes go on that meet like `lane`, with their results, when all of them that live are there. */
static bool complete(emu_cpu *cpu, emu_warp *warp, uint32_t lane) {
  emu_meeting meeting = *meeting_of(warp, lane);
  uint32_t mask = meeting.mask & warp->live;
  if ((warp->meeting & mask) != mask)
    return false;
  for (uint32_t rest = warp->ragged ? mask : 0; rest; rest &= rest - 1) {
    const emu_meeting *other = &warp->lanes[__builtin_ctz(rest)];
    if (other->operation != meeting.operation || (other->mask & warp->live) != mask)
      return false;
  }
  if (whole_butterfly(warp, &meeting, mask)) {
    uint32_t by = meeting.source & 31;
    for (uint32_t to = 0; to < EMU_WARP; to++)
      warp->result[to] = warp->value[to ^ by];
    warp->predicates = UINT32_MAX;
  } else if (meeting.operation < VOTE) {
    for (uint32_t rest = mask; rest; rest &= rest - 1) {
      uint32_t to = (uint32_t)__builtin_ctz(rest);
      shuffle(warp, to, meeting_of(warp, to), mask);
    }
  } else if (meeting.operation < BARRIER) {
    uint32_t result = vote(warp, meeting.operation - VOTE, mask);
    for (uint32_t rest = mask; rest; rest &= rest - 1)
      warp->result[__builtin_ctz(rest)] = result;
  }
  warp->meeting &= ~mask;
  warp->runnable |= mask;
  cpu->runnable_warps |= (uint32_t)1 << (warp - cpu->warps);
  return true;
}

static bool same(const emu_meeting *a, const emu_meeting *b) {
  return a->mask == b->mask && a->operation == b->operation && a->source == b->source && a->clamp == b->clamp;
}

/* Waits for the other lanes; afterwards the results of the calling lane stand in the warp. */
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
  if (!complete(cpu, warp, lane)) {
    emu_block_thread(cpu, index);
    emu_yield(cpu, index);
  }
  *own = lane;
  return warp;
}

void emu_warp_lane_ended(emu_cpu *cpu, emu_warp *warp) {
  for (uint32_t rest = warp->meeting; rest; rest &= warp->meeting) {
    uint32_t lane = (uint32_t)__builtin_ctz(rest);
    rest &= rest - 1;
    complete(cpu, warp, lane);
  }
}

void ocp_emu_warp_barrier(ocp_emu_thread *thread, uint32_t mask) {
  (void)thread;
  uint32_t lane;
  meet((emu_meeting){mask, BARRIER, 0, 0}, 0, &lane);
}

uint32_t ocp_emu_shfl(ocp_emu_thread *thread, uint32_t mask, uint32_t mode, uint32_t value, uint32_t lane,
                      uint32_t clamp, uint32_t *predicate) {
  (void)thread;
  uint32_t own;
  const emu_warp *warp = meet((emu_meeting){mask, SHUFFLE + (mode & 3), lane, clamp}, value, &own);
  if (predicate)
    *predicate = warp->predicates >> own & 1;
  return warp->result[own];
}

uint32_t ocp_emu_vote(ocp_emu_thread *thread, uint32_t mask, uint32_t mode, uint32_t predicate) {
  (void)thread;
  uint32_t own;
  return meet((emu_meeting){mask, VOTE + (mode & 3), 0, 0}, predicate, &own)->result[own];
}
