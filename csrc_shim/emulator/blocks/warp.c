/* The warp operations that kernels call: bar.warp.sync, shuffles, votes, matches, reductions, and matrix operations. */
#include "emulator/blocks/warp.h"

#include "emulator/blocks/check.h"
#include "emulator/blocks/fiber.h"
#include "emulator/blocks/meeting.h"
#include "emulator/module.h"
#include "emulator/state.h"

static bool same(const emu_meeting *a, const emu_meeting *b) {
  return a->mask == b->mask && a->operation == b->operation && a->source == b->source && a->clamp == b->clamp;
}

/* Waits for the other lanes of the operation. Returns the warp, whose result[*own] is then the calling lane's result.
 * *own: number of the calling lane. */
static inline emu_warp *meet(ocp_emu_thread *thread, const char *name, emu_meeting meeting, uint32_t value,
                             uint32_t *own) {
  emu_cpu *cpu = emu_running;
  uint32_t index = cpu->current, lane = index % EMU_WARP;
  emu_warp *warp = &cpu->warps[index / EMU_WARP];
  emu_check_mask(thread, name, meeting.mask);
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
  } else {
    emu_step(cpu);
  }
  *own = lane;
  return warp;
}

void ocp_emu_warp_barrier(ocp_emu_thread *thread, uint32_t mask) {
  uint32_t lane;
  meet(thread, "bar.warp.sync", (emu_meeting){mask, EMU_BARRIER, 0, 0}, 0, &lane);
}

uint32_t ocp_emu_shfl(ocp_emu_thread *thread, uint32_t mask, uint32_t mode, uint32_t value, uint32_t lane,
                      uint32_t clamp, uint32_t *predicate) {
  uint32_t own;
  const emu_warp *warp =
      meet(thread, "shfl.sync", (emu_meeting){mask, EMU_SHUFFLE + (mode & 3), lane, clamp}, value, &own);
  if (predicate)
    *predicate = warp->predicates >> own & 1;
  return warp->result[own];
}

uint32_t ocp_emu_vote(ocp_emu_thread *thread, uint32_t mask, uint32_t mode, uint32_t predicate) {
  uint32_t own;
  return meet(thread, "vote.sync", (emu_meeting){mask, EMU_VOTE + (mode & 3), 0, 0}, predicate, &own)->result[own];
}

uint32_t ocp_emu_match(ocp_emu_thread *thread, uint32_t mask, uint32_t mode, uint32_t value) {
  uint32_t own;
  return meet(thread, "match.sync", (emu_meeting){mask, EMU_MATCH + (mode & 1), 0, 0}, value, &own)->result[own];
}

uint32_t ocp_emu_reduce(ocp_emu_thread *thread, uint32_t mask, uint32_t mode, uint32_t value) {
  uint32_t own;
  return meet(thread, "redux.sync", (emu_meeting){mask, EMU_REDUCE + (mode & 7), 0, 0}, value, &own)->result[own];
}

/* Waits for the other lanes of the warp in a matrix operation. `fragments` is on this lane's stack, where the lane that
 * arrives last reads and writes it. */
static void meet_with(ocp_emu_thread *thread, uint32_t operation, uint32_t source, uint32_t clamp,
                      const emu_fragments *fragments) {
  const emu_cpu *cpu = emu_running;
  uint32_t index = cpu->current, lane;
  emu_running->warps[index / EMU_WARP].fragments[index % EMU_WARP] = fragments;
  meet(thread, "mma", (emu_meeting){UINT32_MAX, operation, source, clamp}, 0, &lane);
}

void ocp_emu_mma(ocp_emu_thread *thread, uint32_t form, const uint32_t *a, const uint32_t *b, const uint32_t *c,
                 uint32_t *d) {
  meet_with(thread, EMU_MULTIPLY, form, 0, &(emu_fragments){.a = a, .b = b, .c = c, .d = d});
}

/* Whether the checking mode checks this lane's row address: only the first 8 * count lanes give one. */
static bool is_checked_row(uint32_t count) {
  const emu_cpu *cpu = emu_running;
  return cpu->launch->function->meta->checked && cpu->current % EMU_WARP < 8 * count;
}

void ocp_emu_load_matrix(ocp_emu_thread *thread, uint32_t count, uint32_t transposed, const void *row, uint32_t *d) {
  if (is_checked_row(count)) {
    emu_check_aligned(thread, EMU_LOAD, row, 16);
    ocp_emu_check_load(thread, row, 16);
  }
  meet_with(thread, EMU_LOAD_MATRIX, count, transposed, &(emu_fragments){.row = (void *)row, .d = d});
}

void ocp_emu_store_matrix(ocp_emu_thread *thread, uint32_t count, uint32_t transposed, void *row, const uint32_t *a) {
  if (is_checked_row(count)) {
    emu_check_aligned(thread, EMU_STORE, row, 16);
    ocp_emu_check_store(thread, row, 16);
  }
  meet_with(thread, EMU_STORE_MATRIX, count, transposed, &(emu_fragments){.row = row, .a = a});
}
