/* The checking mode: findings of a launch, and the order of a block's accesses to shared memory. */
#ifndef OCP_EMULATOR_BLOCKS_ORDER_H
#define OCP_EMULATOR_BLOCKS_ORDER_H

#include "emulator/blocks/block.h"
#include "emulator/clock.h"
#include "emulator/findings.h"
#include "emulator/kernel.h"
#include "emulator/shadow.h"

/* Whether a finding is the first of its kind in the launch: only the first one is kept. */
bool emu_order_first(emu_launch *launch, emu_finding_kind kind);
/* Keeps a finding of an access, and makes the launch fail. */
void emu_order_report(ocp_emu_thread *thread, emu_finding_kind kind, emu_access access, uint64_t address,
                      uint32_t bytes, const char *where);

/* Before a block with `size` bytes of shared memory: forgets all accesses. False: out of host memory. */
bool emu_order_begin(emu_cpu *cpu, uint32_t size);
/* Before an access to shared memory: reports a race with an earlier one. */
void emu_order_note(ocp_emu_thread *thread, emu_access access, uint32_t offset, uint32_t bytes);
/* Record that threads have met at a barrier, which orders their earlier accesses to shared memory before their later
 * ones: all threads of the block; at a numbered barrier, the lanes of each warp that took part (`arrived`) and those
 * that also waited (`waiting`); at bar.warp.sync, the lanes `mask` of a warp. */
void emu_order_barrier(emu_cpu *cpu);
void emu_order_numbered_barrier(emu_cpu *cpu, const uint32_t *arrived, const uint32_t *waiting);
void emu_order_warp_barrier(emu_cpu *cpu, uint32_t warp, uint32_t mask);
/* Records a fence or an ordered access of a thread. */
void emu_order_fence(ocp_emu_thread *thread, bool acquires, bool releases);

/* cp.async. begun: the thread has started a copy to shared memory. commit: it has closed a group. wait: it has waited
 * until at most `left` groups are unfinished (UINT32_MAX: for all copies). */
void ocp_emu_copy_begun(ocp_emu_thread *thread, const void *address, uint32_t bytes);
void ocp_emu_copy_commit(ocp_emu_thread *thread, uint32_t unused);
void ocp_emu_copy_wait(ocp_emu_thread *thread, uint32_t left);

#endif
