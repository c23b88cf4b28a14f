/* The checking mode: findings of a launch, and races between the threads of a block in shared memory. */
#ifndef OCP_EMULATOR_BLOCKS_ORDER_H
#define OCP_EMULATOR_BLOCKS_ORDER_H

#include "emulator/blocks/block.h"
#include "emulator/clock.h"
#include "emulator/findings.h"
#include "emulator/kernel.h"
#include "emulator/shadow.h"

/* Whether a finding is the first of its kind in the launch. Only that one is reported. */
bool emu_order_first(emu_launch *launch, emu_finding_kind kind);
/* Keeps the text of a finding, which becomes the error text of the launch. */
void emu_order_keep(emu_launch *launch, const char *text);
/* Reports a finding about an access, and makes the launch fail. */
void emu_order_report(ocp_emu_thread *thread, emu_finding_kind kind, emu_access access, uint64_t address,
                      uint32_t bytes, const char *where);

/* Called after each EMU_PATIENCE steps of running blocks, on the host thread's own stack. Logs a warning when the
 * launch has run for ocp_emu_config.slow_milliseconds; from then on SIGINT makes the launch fail. Returns false if the
 * block must end, because the launch has failed. */
bool emu_launch_continues(emu_cpu *cpu, const uint32_t block[3]);
void emu_launch_ended(emu_launch *launch);

/* Called before a block with `size` bytes of shared memory runs: forgets all accesses. False: out of host memory. */
bool emu_order_begin(emu_cpu *cpu, uint32_t size);
/* Called before an access to shared memory: reports a race with an earlier access, and records this one. */
void emu_order_note(ocp_emu_thread *thread, emu_access access, uint32_t offset, uint32_t bytes);
/* Record that threads have met at a barrier, which orders their earlier accesses to shared memory before their later
 * ones: all threads of the block; at a numbered barrier, the lanes of each warp that took part (`arrived`) and those
 * that also waited (`waiting`); at bar.warp.sync, the lanes `mask` of a warp. */
void emu_order_barrier(emu_cpu *cpu);
void emu_order_numbered_barrier(emu_cpu *cpu, const uint32_t *arrived, const uint32_t *waiting);
void emu_order_warp_barrier(emu_cpu *cpu, uint32_t warp, uint32_t mask);
/* Records that a thread executes a fence or an ordered access. */
void emu_order_fence(ocp_emu_thread *thread, bool acquires, bool releases);

/* A kernel calls these for cp.async. ocp_emu_copy_begun: the thread has started a copy to shared memory. _commit: it
 * has closed a group of copies. _wait: it has waited until at most `left` groups are unfinished (UINT32_MAX: until all
 * copies are finished). */
void ocp_emu_copy_begun(ocp_emu_thread *thread, const void *address, uint32_t bytes);
void ocp_emu_copy_commit(ocp_emu_thread *thread, uint32_t unused);
void ocp_emu_copy_wait(ocp_emu_thread *thread, uint32_t left);

#endif
