/* Finds races between blocks of a launch in global memory, and ld.global.nc of memory that the launch writes.
 *
 * A counter of the launch advances at each fence, acquire and release; an atomic, and a load with any memory order,
 * counts as an acquire. Each 4-byte word of memory stores the block and the counter of its last store and of its last
 * load. An access counts as ordered after another block's access if, since that access, the other block has released
 * (by a fence or a release) and the present block has acquired (by a fence or an acquire). Happens-before also requires
 * that the acquire reads what the release wrote, which is not checked: so no report is false, but some races are
 * missed. Fences and accesses of .cta scope order shared memory only (order.c). Stores of equal values do not race. */
#include "emulator/blocks/global_order.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "emulator/blocks/check.h"
#include "emulator/blocks/order.h"
#include "emulator/module.h"
#include "emulator/shadow.h"
#include "emulator/state.h"

#define WORD 4u
#define MAX_TIME ((1u << 20) - 1)
#define SEVERAL ((1u << 24) - 1) /* in place of a block number: several blocks have read the word */
#define SERIALS (1u << 15)

typedef struct note {
  uint32_t serial, read_only, block, time, mask; /* packed into 15, 1, 24, 20 and 4 bits; serial 0: no access */
} note;

static uint64_t packed(note one) {
  return (uint64_t)one.serial << 49 | (uint64_t)one.read_only << 48 | (uint64_t)one.block << 24 | one.time << 4 |
         one.mask;
}

static note unpacked(uint64_t bits) {
  return (note){(uint32_t)(bits >> 49), bits >> 48 & 1, bits >> 24 & SEVERAL, bits >> 4 & MAX_TIME, bits & 15};
}

bool emu_global_begin(emu_launch *launch) {
  static _Atomic uint32_t launches;
  if (!emu.config.check || !launch->function->meta->checked || launch->blocks >= SEVERAL)
    return true;
  uint32_t serial = (atomic_fetch_add(&launches, 1) + 1) % SERIALS;
  if (serial == 0) {
    emu_shadow_forget_words(); /* from here on, new launches get the serial numbers of earlier ones */
    serial = (atomic_fetch_add(&launches, 1) + 1) % SERIALS;
  }
  launch->serial = serial;
  launch->released = calloc(2 * launch->blocks, sizeof *launch->released);
  return launch->released != NULL;
}

void emu_global_end(emu_launch *launch) { free(launch->released); }

static uint32_t block_of(const ocp_emu_thread *thread) {
  return thread->ctaid[0] + thread->nctaid[0] * (thread->ctaid[1] + thread->nctaid[1] * thread->ctaid[2]);
}

static void synchronize(ocp_emu_thread *thread, uint32_t what) {
  emu_cpu *cpu = thread->scheduler;
  emu_launch *launch = cpu->launch;
  emu_order_fence(thread, what & EMU_ACQUIRES, what & EMU_RELEASES);
  if (!launch->released || what & EMU_OF_BLOCK)
    return;
  uint32_t now = atomic_fetch_add(&launch->now, 1) + 1;
  if (what & EMU_RELEASES)
    atomic_store(&launch->released[block_of(thread)], now);
  if (what & EMU_ACQUIRES)
    atomic_store(&launch->released[launch->blocks + block_of(thread)], now);
}

static bool is_ordered(emu_launch *launch, uint32_t block, const note *other) {
  if (atomic_load(&launch->released[launch->blocks + block]) <= other->time)
    return false;
  return other->block == SEVERAL || atomic_load(&launch->released[other->block]) > other->time;
}

static void report(ocp_emu_thread *thread, emu_access access, uint64_t address, uint32_t bytes, uint32_t other,
                   const char *does) {
  char where[200], name[60] = "another block";
  const uint32_t *size = thread->nctaid;
  if (other != SEVERAL)
    snprintf(name, sizeof name, "block (%u,%u,%u)", other % size[0], other / size[0] % size[1],
             other / size[0] / size[1]);
  snprintf(where, sizeof where, "global memory that %s %s, with no fence or atomic that orders the blocks", name, does);
  emu_order_report(thread, EMU_RACE, access, address, bytes, where);
}

void emu_global_settle(emu_cpu *cpu) {
  emu_doubt *doubt = &cpu->doubt;
  uint32_t bytes = doubt->bytes;
  doubt->bytes = 0;
  if (bytes && memcmp(doubt->before, (const void *)(doubt->address + (uint64_t)emu.alias), bytes) != 0)
    report(&doubt->thread, EMU_STORE, doubt->address, bytes, doubt->other, "writes");
}

/* Remembers a store to memory that another block has stored to, until emu_global_settle compares the memory. */
static void doubt(ocp_emu_thread *thread, uint64_t address, uint32_t bytes, uint32_t other) {
  emu_cpu *cpu = thread->scheduler;
  if (cpu->doubt.bytes || bytes > sizeof cpu->doubt.before)
    return;
  cpu->doubt = (emu_doubt){.thread = *thread, .address = address, .bytes = bytes, .other = other};
  memcpy(cpu->doubt.before, (const void *)(address + (uint64_t)emu.alias), bytes);
}

static note merged(note before, note own) {
  if (before.serial != own.serial)
    return own;
  if (before.block == own.block && before.time == own.time) {
    own.mask |= before.mask;
    own.read_only |= before.read_only;
  } else if (before.block != own.block && before.mask & own.mask) {
    own.block = SEVERAL;
    own.mask &= before.mask;
    own.time = before.time;
    own.read_only |= before.read_only;
  }
  return own;
}

/* Checks an access to one word against earlier ones, and records it; `own.mask`: bit i for byte i of the word. */
static void note_word(ocp_emu_thread *thread, uint64_t address, uint32_t bytes, uint32_t what, emu_word *word,
                      note own) {
  const emu_cpu *cpu = thread->scheduler;
  emu_launch *launch = cpu->launch;
  bool stores = (what & 3) != EMU_LOAD;
  note written = unpacked(atomic_load_explicit(&word->written, memory_order_relaxed));
  note read = unpacked(atomic_load_explicit(&word->read, memory_order_relaxed));
  bool wrote = written.serial == own.serial && written.mask & own.mask;
  bool reads = read.serial == own.serial && read.mask & own.mask;
  if ((wrote && what & EMU_READ_ONLY) || (reads && stores && read.read_only))
    emu_order_report(thread, EMU_READ_ONLY_WRITTEN, what & 3, address, bytes,
                     "the kernel reads this memory by ld.global.nc, which is for read-only memory, and also writes it");
  else if (!(what & EMU_STRONG)) {
    if (wrote && written.block != own.block && !is_ordered(launch, own.block, &written)) {
      if (stores)
        doubt(thread, address, bytes, written.block);
      else
        report(thread, EMU_LOAD, address, bytes, written.block, "writes");
    }
    if (stores && reads && read.block != own.block && !is_ordered(launch, own.block, &read))
      report(thread, EMU_STORE, address, bytes, read.block, "reads");
  }
  if (what & EMU_STRONG)
    return; /* not recorded: races between a strong access and a later plain one are missed */
  if (stores) {
    if (written.serial == own.serial && written.block == own.block && written.time == own.time)
      own.mask |= written.mask;
    atomic_store_explicit(&word->written, packed(own), memory_order_relaxed);
  } else {
    own.read_only = (what & EMU_READ_ONLY) != 0;
    atomic_store_explicit(&word->read, packed(merged(read, own)), memory_order_relaxed);
  }
}

static void note_access(ocp_emu_thread *thread, uint64_t address, uint32_t bytes, uint32_t what) {
  const emu_cpu *cpu = thread->scheduler;
  const emu_launch *launch = cpu->launch;
  uint32_t time = atomic_load_explicit(&launch->now, memory_order_relaxed);
  if (!launch->released || time >= MAX_TIME ||
      emu_shadow_first_not(address, bytes, EMU_BYTE_ALLOCATED) != bytes) /* ocp_emu_check_load etc. report it */
    return;
  for (uint64_t at = address / WORD * WORD; at < address + bytes; at += WORD) {
    uint64_t first = at < address ? address - at : 0, last = address + bytes - at;
    uint32_t mask = (uint32_t)((1u << (last < WORD ? last : WORD)) - (1u << first));
    note_word(thread, address, bytes, what, emu_shadow_word(at),
              (note){launch->serial, 0, block_of(thread), time, mask});
  }
}

void ocp_emu_check_access(ocp_emu_thread *thread, const void *pointer, uint32_t bytes, uint32_t what) {
  if (!emu.config.check)
    return;
  uint64_t address = (uint64_t)pointer - (uint64_t)emu.alias;
  emu_check_aligned(thread, what & 3, pointer, bytes);
  if (what & (EMU_ACQUIRES | EMU_RELEASES))
    synchronize(thread, what);
  emu_global_settle(thread->scheduler);
  if (emu_is_device_address(address) && bytes <= emu.base + emu.bytes - address)
    note_access(thread, address, bytes, what);
}

void ocp_emu_fence(ocp_emu_thread *thread, uint32_t what) {
  if (emu.config.check)
    synchronize(thread, what | EMU_ACQUIRES | EMU_RELEASES);
}
