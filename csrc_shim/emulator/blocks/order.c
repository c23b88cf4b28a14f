/* The checking mode: finds races between the threads of a block in shared memory.
 *
 * A counter advances at each barrier, fence and ordered access. An earlier access is ordered before the current access
 * of another thread if it was made before a barrier in which both threads took part: of the block, of warps (per pair
 * of warps), or of lanes (per pair of lanes). In PTX, it is also ordered if, since that access, the other thread has
 * released and the current thread has acquired, by fences or ordered accesses. Whether the acquire read what the
 * release wrote is not checked, so some races are missed. Atomics themselves never race. */
#include "emulator/blocks/order.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/host.h"
#include "base/interrupt.h"
#include "emulator/module.h"

/* ---- findings of a launch ---- */

static const char *const accesses[] = {"", "reads", "writes", "updates"};

bool emu_order_first(emu_launch *launch, emu_finding_kind kind) {
  unsigned bit = 1u << kind;
  return !(atomic_fetch_or(&launch->found, bit) & bit);
}

void emu_order_keep(emu_launch *launch, const char *text) {
  int index = emu_finding_keep(text);
  if (index >= 0)
    atomic_store(&launch->finding, index + 1);
}

void emu_order_report(ocp_emu_thread *thread, emu_finding_kind kind, emu_access access, uint64_t address,
                      uint32_t bytes, const char *where) {
  const emu_cpu *cpu = thread->scheduler;
  emu_launch *launch = cpu->launch;
  if (!emu_order_first(launch, kind))
    return;
  char text[EMU_FINDING_BYTES];
  snprintf(text, sizeof text, "%s: kernel %s, block (%u,%u,%u), thread (%u,%u,%u) %s %u bytes at 0x%" PRIx64 ": %s",
           emu_finding_kinds[kind], launch->function->name, thread->ctaid[0], thread->ctaid[1], thread->ctaid[2],
           thread->tid[0], thread->tid[1], thread->tid[2], accesses[access], bytes, address, where);
  emu_order_keep(launch, text);
}

/* ---- launches that may never end ---- */

static uint64_t nanoseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Writes a line to ONNX Runtime's log, or to the standard error if no session has loaded the library. */
static void warn(const char *text) {
  if (ocp_logger)
    ocp_log(ORT_LOGGING_LEVEL_WARNING, text, "emulated device");
  else
    fprintf(stderr, "ort-cuda-plugin: warning: %s\n", text);
}

static void report_slow(emu_cpu *cpu, const uint32_t block[3], double seconds) {
  emu_launch *launch = cpu->launch;
  char text[EMU_FINDING_BYTES], threads[80] = "";
  if (launch->function->meta->mode == OCP_EMU_FIBER)
    snprintf(threads, sizeof threads, "; %u of the %u threads of this block have not ended", cpu->live, cpu->threads);
  snprintf(text, sizeof text,
           "kernel %s has run for %.3g seconds on the emulated device, and runs block (%u,%u,%u) of (%u,%u,%u)%s. Does "
           "a loop never end? SIGINT (Ctrl-C) ends the launch",
           launch->function->name, seconds, block[0], block[1], block[2], launch->grid[0], launch->grid[1],
           launch->grid[2], threads);
  warn(text);
}

bool emu_launch_continues(emu_cpu *cpu, const uint32_t block[3]) {
  emu_launch *launch = cpu->launch;
  cpu->patience = EMU_PATIENCE;
  if (atomic_load(&launch->error))
    return false;
  uint64_t now = nanoseconds(), begun = 0;
  if (atomic_compare_exchange_strong(&launch->watched, &begun, now))
    return true;
  uint64_t limit = emu.config.slow_milliseconds ? emu.config.slow_milliseconds : 10000;
  if (now - begun < limit * 1000000u)
    return true;
  if (!atomic_exchange(&launch->is_slow, true)) {
    ocp_interrupts_begin();
    atomic_store(&launch->interrupts, ocp_interrupts() + 1);
    report_slow(cpu, block, (double)(now - begun) / 1e9);
    return true;
  }
  uint32_t first = atomic_load(&launch->interrupts); /* 0: another thread is about to report the launch */
  if (!first || (int32_t)(ocp_interrupts() - first) < 0)
    return true;
  int none = CUDA_SUCCESS;
  if (atomic_compare_exchange_strong(&launch->error, &none, CUDA_ERROR_LAUNCH_FAILED)) {
    char text[EMU_FINDING_BYTES];
    snprintf(text, sizeof text, "interrupted: kernel %s, block (%u,%u,%u): SIGINT ended the launch after %.3g seconds",
             launch->function->name, block[0], block[1], block[2], (double)(now - begun) / 1e9);
    emu_order_keep(launch, text);
  }
  return false;
}

void emu_launch_ended(emu_launch *launch) {
  if (atomic_load_explicit(&launch->is_slow, memory_order_relaxed))
    ocp_interrupts_end();
}

/* ---- accesses ---- */

/* The last accesses to one byte of shared memory. */
typedef struct cell {
  uint16_t writer, reader; /* linear indices of the threads that last stored and last loaded the byte */
  uint32_t written, read;  /* the counter at these accesses; 0: no access */
} cell;

/* A cp.async that its thread has not waited for: its destination in shared memory, the number of its group, and the
 * next entry of its list. */
typedef struct pending_copy {
  uint32_t offset, bytes, group, next;
} pending_copy;

struct emu_races {
  uint32_t now, barrier;                             /* the counter, and its value at the block's last barrier */
  uint32_t warps[EMU_MAX_WARPS][EMU_MAX_WARPS];      /* [w][v]: warp v's accesses below this counter precede warp w */
  uint32_t lanes[EMU_MAX_WARPS][EMU_WARP][EMU_WARP]; /* the same for pairs of lanes of a warp */
  /* The latest store to bytes that another thread has stored to, with no order between the two. It is a race only if it
   * changes a byte; settle_doubt compares with `before` when the store has happened. */
  uint32_t doubtful_bytes, doubtful_offset, doubtful_other;
  ocp_emu_thread *doubtful;
  uint8_t before[16];
  uint32_t released[EMU_MAX_THREADS], acquired[EMU_MAX_THREADS]; /* `now` at each thread's last release, acquire */
  uint32_t groups[EMU_MAX_THREADS];                              /* cp.async groups that each thread has closed */
  uint32_t first[EMU_MAX_THREADS]; /* head of each thread's list of copies: index in `copies` + 1; 0: empty */
  uint32_t num_copies, free_copy;
  pending_copy *copies;
  size_t room;
  cell cells[EMU_MAX_SHARED];
};

static uint32_t index_of(const ocp_emu_thread *thread) {
  return thread->tid[0] + thread->ntid[0] * (thread->tid[1] + thread->ntid[1] * thread->tid[2]);
}

/* Whether the access of thread `other` when the counter was `time` is ordered before the present access of `thread`. */
static bool is_ordered(const struct emu_races *races, uint32_t thread, uint32_t other, uint32_t time) {
  if (thread == other || time < races->barrier)
    return true;
  if (time < races->released[other] && time < races->acquired[thread])
    return true;
  uint32_t w = thread / EMU_WARP, v = other / EMU_WARP;
  return time < races->warps[w][v] || (w == v && time < races->lanes[w][thread % EMU_WARP][other % EMU_WARP]);
}

static void report_race(ocp_emu_thread *thread, emu_access access, uint32_t offset, uint32_t bytes, uint32_t other,
                        const char *does) {
  char where[200];
  const uint32_t *size = thread->ntid;
  snprintf(where, sizeof where, "shared memory that thread (%u,%u,%u) %s, with no barrier between", other % size[0],
           other / size[0] % size[1], other / size[0] / size[1], does);
  emu_order_report(thread, EMU_RACE, access, offset, bytes, where);
}

/* Reports the doubtful store (see emu_races) as a race if it has changed a byte. Afterwards no store is doubtful. */
static void settle_doubt(emu_cpu *cpu) {
  struct emu_races *races = cpu->races;
  uint32_t bytes = races->doubtful_bytes;
  races->doubtful_bytes = 0;
  if (bytes && memcmp(races->before, cpu->shared + races->doubtful_offset, bytes) != 0)
    report_race(races->doubtful, EMU_STORE, races->doubtful_offset, bytes, races->doubtful_other, "writes");
}

void emu_order_note(ocp_emu_thread *thread, emu_access access, uint32_t offset, uint32_t bytes) {
  emu_cpu *cpu = thread->scheduler;
  struct emu_races *races = cpu->races;
  uint32_t own = index_of(thread);
  settle_doubt(cpu);
  for (uint32_t at = offset; at < offset + bytes; at++) {
    cell *one = &races->cells[at];
    if (access == EMU_ATOMIC) {
      *one = (cell){0};
    } else if (access == EMU_LOAD) {
      if (one->written && !is_ordered(races, own, one->writer, one->written))
        report_race(thread, access, offset, bytes, one->writer, "writes");
      if (!one->read || is_ordered(races, own, one->reader, one->read))
        one->reader = (uint16_t)own, one->read = races->now;
    } else {
      if (one->read && !is_ordered(races, own, one->reader, one->read))
        report_race(thread, access, offset, bytes, one->reader, "reads");
      if (one->written && !is_ordered(races, own, one->writer, one->written) && !races->doubtful_bytes && bytes <= 16) {
        races->doubtful = thread;
        races->doubtful_offset = offset, races->doubtful_bytes = bytes, races->doubtful_other = one->writer;
        memcpy(races->before, cpu->shared + offset, bytes);
      }
      *one = (cell){.writer = (uint16_t)own, .written = races->now};
    }
  }
}

static void join(uint32_t *into, const uint32_t *from, uint32_t count) {
  for (uint32_t i = 0; i < count; i++)
    into[i] = into[i] > from[i] ? into[i] : from[i];
}

static bool follows_order(const emu_cpu *cpu) {
  return cpu->races && emu.config.check && cpu->launch->function->meta->checked;
}

void emu_order_barrier(emu_cpu *cpu) {
  if (follows_order(cpu)) {
    settle_doubt(cpu);
    cpu->races->barrier = ++cpu->races->now;
  }
}

void emu_order_numbered_barrier(emu_cpu *cpu, const uint32_t *arrived, const uint32_t *waiting) {
  if (!follows_order(cpu))
    return;
  struct emu_races *races = cpu->races;
  settle_doubt(cpu);
  uint32_t known[EMU_MAX_WARPS] = {0}, now = ++races->now;
  for (uint32_t warp = 0; warp < cpu->num_warps; warp++)
    if (arrived[warp]) {
      join(known, races->warps[warp], EMU_MAX_WARPS);
      known[warp] = now;
    }
  for (uint32_t warp = 0; warp < cpu->num_warps; warp++)
    if (waiting[warp])
      join(races->warps[warp], known, EMU_MAX_WARPS);
}

void emu_order_warp_barrier(emu_cpu *cpu, uint32_t warp, uint32_t mask) {
  if (!follows_order(cpu))
    return;
  struct emu_races *races = cpu->races;
  settle_doubt(cpu);
  uint32_t known[EMU_WARP] = {0}, now = ++races->now;
  for (uint32_t rest = mask; rest; rest &= rest - 1)
    join(known, races->lanes[warp][__builtin_ctz(rest)], EMU_WARP);
  for (uint32_t rest = mask; rest; rest &= rest - 1)
    known[__builtin_ctz(rest)] = now;
  for (uint32_t rest = mask; rest; rest &= rest - 1)
    join(races->lanes[warp][__builtin_ctz(rest)], known, EMU_WARP);
}

void emu_order_fence(ocp_emu_thread *thread, bool acquires, bool releases) {
  emu_cpu *cpu = thread->scheduler;
  if (!follows_order(cpu))
    return;
  struct emu_races *races = cpu->races;
  settle_doubt(cpu);
  uint32_t own = index_of(thread), now = ++races->now;
  races->acquired[own] = acquires ? now : races->acquired[own];
  races->released[own] = releases ? now : races->released[own];
}

/* ---- shared memory: copies in flight ---- */

void ocp_emu_copy_begun(ocp_emu_thread *thread, const void *address, uint32_t bytes) {
  emu_cpu *cpu = thread->scheduler;
  uint64_t offset = (uint64_t)address - (uint64_t)cpu->shared;
  if (!follows_order(cpu) || offset > EMU_MAX_SHARED - bytes)
    return;
  struct emu_races *races = cpu->races;
  uint32_t index = races->free_copy;
  if (index) {
    races->free_copy = races->copies[index - 1].next;
  } else {
    if (races->num_copies == races->room) {
      size_t room = races->room ? 2 * races->room : 1024;
      pending_copy *grown = realloc(races->copies, room * sizeof *grown);
      if (!grown)
        return; /* out of host memory: the copy counts as finished */
      races->copies = grown;
      races->room = room;
    }
    index = ++races->num_copies;
  }
  uint32_t own = index_of(thread);
  races->copies[index - 1] = (pending_copy){(uint32_t)offset, bytes, races->groups[own], races->first[own]};
  races->first[own] = index;
  memset(cpu->written + offset, EMU_BLOCK_PENDING, bytes);
}

void ocp_emu_copy_commit(ocp_emu_thread *thread, uint32_t unused) {
  const emu_cpu *cpu = thread->scheduler;
  (void)unused;
  if (follows_order(cpu))
    cpu->races->groups[index_of(thread)]++;
}

void ocp_emu_copy_wait(ocp_emu_thread *thread, uint32_t left) {
  emu_cpu *cpu = thread->scheduler;
  if (!follows_order(cpu))
    return;
  struct emu_races *races = cpu->races;
  uint32_t own = index_of(thread), closed = races->groups[own];
  for (uint32_t *link = &races->first[own]; *link;) {
    uint32_t index = *link;
    pending_copy *copy = &races->copies[index - 1];
    if (left != UINT32_MAX && (uint64_t)copy->group + left >= closed) {
      link = &copy->next;
      continue;
    }
    for (uint32_t at = copy->offset; at < copy->offset + copy->bytes; at++)
      if (cpu->written[at] == EMU_BLOCK_PENDING) {
        cpu->written[at] = EMU_BLOCK_WRITTEN;
        races->cells[at] = (cell){.writer = (uint16_t)own, .written = races->now};
      }
    *link = copy->next;
    copy->next = races->free_copy;
    races->free_copy = index;
  }
}

bool emu_order_begin(emu_cpu *cpu, uint32_t size) {
  if (!cpu->races && !(cpu->races = calloc(1, sizeof *cpu->races)))
    return false;
  struct emu_races *races = cpu->races;
  races->now = races->barrier = 1;
  memset(races->warps, 0, sizeof races->warps);
  memset(races->lanes, 0, sizeof races->lanes);
  memset(races->released, 0, sizeof races->released);
  memset(races->acquired, 0, sizeof races->acquired);
  memset(races->groups, 0, sizeof races->groups);
  memset(races->first, 0, sizeof races->first);
  memset(races->cells, 0, size * sizeof *races->cells);
  races->num_copies = races->free_copy = races->doubtful_bytes = 0;
  return true;
}
