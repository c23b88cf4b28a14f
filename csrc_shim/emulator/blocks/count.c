/* The counting mode, for kernels compiled for it: records the memory accesses that the performance model needs. */
#include "emulator/blocks/count.h"

#include <stdatomic.h>
#include <string.h>

#include "emulator/blocks/check.h"
#include "emulator/blocks/fiber.h"
#include "emulator/kernel.h"
#include "emulator/state.h"

static _Atomic(ocp_emu_count *) counting;

ocp_emu_count *emu_counting(void) { return atomic_load_explicit(&counting, memory_order_relaxed); }

void ocp_emu_count_launches(ocp_emu_count *count) { atomic_store(&counting, count); }

void emu_count_begin(ocp_emu_count *count, uint32_t number) {
  count->block = number;
  memset(count->turns, 0, (size_t)count->num_places * EMU_MAX_THREADS * sizeof *count->turns);
}

void emu_count_end(ocp_emu_count *count) {
  for (uint32_t place = 0; place < count->num_places; place++) {
    const uint32_t *turns = count->turns + (size_t)place * EMU_MAX_THREADS;
    for (uint32_t warp = 0; warp < EMU_MAX_WARPS; warp++) {
      uint32_t most = 0;
      for (uint32_t lane = 0; lane < EMU_WARP; lane++)
        most = turns[warp * EMU_WARP + lane] > most ? turns[warp * EMU_WARP + lane] : most;
      count->issued[place] += most;
    }
  }
}

static uint32_t index_of(const ocp_emu_thread *thread) {
  return thread->tid[0] + thread->ntid[0] * (thread->tid[1] + thread->ntid[1] * thread->tid[2]);
}

/* Whether an access lies outside of all memory that a kernel may access. In the counting mode only some blocks run, so
 * a correct kernel may compute such an address from a value that another block would have written. */
static bool is_outside(const ocp_emu_thread *thread, uint64_t host, uint32_t what) {
  const emu_cpu *cpu = thread->scheduler;
  const uint64_t address = host - (uint64_t)emu.alias, shared = host - (uint64_t)cpu->shared;
  const bool loads = !(what & (OCP_EMU_COUNT_STORE | OCP_EMU_COUNT_ATOMIC));
  return !emu_is_device_address(address) && shared >= EMU_MAX_SHARED && !emu_is_pinned_address(host) &&
         !emu_is_of_thread(thread, host, what & UINT16_MAX, loads);
}

void ocp_emu_count_access(ocp_emu_thread *thread, const void *pointer, uint32_t what, uint32_t place) {
  ocp_emu_count *count = emu_counting();
  uint32_t index = index_of(thread);
  if (!count || place >= count->num_places || index >= EMU_MAX_THREADS)
    return;
  if (is_outside(thread, (uint64_t)pointer, what)) {
    count->num_left++;
    emu_abandon_block(thread);
  }
  count->executed[place]++;
  uint32_t turn = count->turns[(size_t)place * EMU_MAX_THREADS + index]++;
  if (turn >= count->max_turns || count->num_accesses == count->max_accesses)
    return;
  const emu_cpu *cpu = thread->scheduler;
  uint64_t host = (uint64_t)pointer, address = host - (uint64_t)emu.alias, shared = host - (uint64_t)cpu->shared;
  if (emu_is_device_address(address))
    what |= OCP_EMU_COUNT_GLOBAL;
  else if (shared < EMU_MAX_SHARED)
    what |= OCP_EMU_COUNT_SHARED;
  count->accesses[count->num_accesses++] = (ocp_emu_access){
      .address = what & OCP_EMU_COUNT_SHARED ? shared : address,
      .what = what,
      .turn = turn,
      .block = count->block,
      .thread = (uint16_t)index,
      .place = (uint16_t)place,
  };
}

void ocp_emu_count_part(ocp_emu_thread *thread, uint32_t place) {
  ocp_emu_count *count = emu_counting();
  uint32_t index = index_of(thread);
  if (!count || place >= count->num_places || index >= EMU_MAX_THREADS)
    return;
  count->executed[place]++;
  count->turns[(size_t)place * EMU_MAX_THREADS + index]++;
}
