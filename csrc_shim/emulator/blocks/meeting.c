/* Warp operations: finds the lanes that wait in the same operation. The last lane to arrive computes the results of
 * all these lanes. */
#include "emulator/blocks/meeting.h"

#include "emulator/blocks/matrix.h"
#include "emulator/blocks/order.h"
#include "emulator/state.h"

/* Returns the lane that `lane` reads from in shfl.sync, or -1 if that is out of range: the predicate is then false. */
static inline int source_of(uint32_t lane, const emu_meeting *meeting) {
  uint32_t segment = meeting->clamp >> 8 & 31, clamp = meeting->clamp & 31, by = meeting->source & 31;
  int lowest = (int)(lane & segment), highest = lowest | (int)(clamp & ~segment & 31), source;
  switch (meeting->operation - EMU_SHUFFLE) {
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

/* Computes the result of shfl.sync for `lane`. If the source lane is not in `present`, PTX leaves the value undefined;
 * this function returns the lane's own value. */
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

/* Returns the result of match.sync: the lanes of `mask` with the value of `lane`; mode 1: all of `mask` if all its
 * lanes have that value, else 0. */
static uint32_t match(const emu_warp *warp, uint32_t mode, uint32_t mask, uint32_t lane) {
  uint32_t same = 0;
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    uint32_t other = (uint32_t)__builtin_ctz(rest);
    same |= (uint32_t)(warp->value[other] == warp->value[lane]) << other;
  }
  return mode == 0 || same == mask ? same : 0;
}

static uint32_t reduce_two(uint32_t mode, uint32_t a, uint32_t b) {
  switch (mode) {
  case 0:
    return a + b;
  case 1:
    return (int32_t)a < (int32_t)b ? a : b;
  case 2:
    return (int32_t)a > (int32_t)b ? a : b;
  case 3:
    return a < b ? a : b;
  case 4:
    return a > b ? a : b;
  case 5:
    return a & b;
  case 6:
    return a | b;
  default:
    return a ^ b;
  }
}

/* Returns the result of redux.sync over the lanes of `mask`, which is not empty. */
static uint32_t reduce(const emu_warp *warp, uint32_t mode, uint32_t mask) {
  uint32_t total = warp->value[__builtin_ctz(mask)];
  for (uint32_t rest = mask & (mask - 1); rest; rest &= rest - 1)
    total = reduce_two(mode, total, warp->value[__builtin_ctz(rest)]);
  return total;
}

static const emu_meeting *meeting_of(const emu_warp *warp, uint32_t lane) {
  return warp->ragged ? &warp->lanes[lane] : &warp->uniform;
}

/* Whether the fast path applies: a butterfly shuffle of a whole warp, the most frequent shuffle (in reductions). */
static bool whole_butterfly(const emu_warp *warp, const emu_meeting *meeting, uint32_t mask) {
  return mask == UINT32_MAX && meeting->operation == EMU_SHUFFLE + 3 && !warp->ragged && meeting->clamp == 31;
}

bool emu_warp_complete(emu_cpu *cpu, emu_warp *warp, uint32_t lane) {
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
  } else if (meeting.operation < EMU_VOTE) {
    for (uint32_t rest = mask; rest; rest &= rest - 1) {
      uint32_t to = (uint32_t)__builtin_ctz(rest);
      shuffle(warp, to, meeting_of(warp, to), mask);
    }
  } else if (meeting.operation < EMU_BARRIER) {
    uint32_t result = vote(warp, meeting.operation - EMU_VOTE, mask);
    for (uint32_t rest = mask; rest; rest &= rest - 1)
      warp->result[__builtin_ctz(rest)] = result;
  } else if (meeting.operation == EMU_BARRIER) {
    emu_order_warp_barrier(cpu, (uint32_t)(warp - cpu->warps), mask);
  } else if (meeting.operation >= EMU_MULTIPLY) {
    emu_matrix_complete(cpu, warp, &meeting, mask);
  } else if (meeting.operation >= EMU_MATCH) {
    bool matches = meeting.operation < EMU_REDUCE;
    uint32_t total = matches ? 0 : reduce(warp, meeting.operation - EMU_REDUCE, mask);
    for (uint32_t rest = mask; rest; rest &= rest - 1) {
      uint32_t to = (uint32_t)__builtin_ctz(rest);
      warp->result[to] = matches ? match(warp, meeting.operation - EMU_MATCH, mask, to) : total;
    }
  }
  warp->meeting &= ~mask;
  warp->runnable |= mask;
  cpu->runnable_warps |= (uint32_t)1 << (warp - cpu->warps);
  return true;
}

void emu_warp_lane_ended(emu_cpu *cpu, emu_warp *warp) {
  for (uint32_t rest = warp->meeting; rest; rest &= warp->meeting) {
    uint32_t lane = (uint32_t)__builtin_ctz(rest);
    rest &= rest - 1;
    emu_warp_complete(cpu, warp, lane);
  }
}
