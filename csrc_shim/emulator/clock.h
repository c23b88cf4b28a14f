/* The checking mode's detector of missing waits: vector clocks of the streams and the host. Outside of that mode, all
 * clocks are NULL. */
#ifndef OCP_EMULATOR_CLOCK_H
#define OCP_EMULATOR_CLOCK_H

#include <stdatomic.h>
#include <stdint.h>

#include "driver/driver.h"

typedef struct emu_clock {
  uint32_t slot, time; /* the operation: the slot of its stream, and its number in that stream */
  uint32_t count;      /* length of `times` */
  uint32_t times[];    /* for each stream, the last operation known to be complete */
} emu_clock;
/* The last accesses to a granule (EMU_GRANULE bytes) of device memory. Each value packs the operation's slot and time,
 * and the first and last byte accessed. */
typedef struct emu_history {
  _Atomic uint64_t write, atomic, reads[2];
} emu_history;
typedef enum emu_access { EMU_LOAD = 1, EMU_STORE = 2, EMU_ATOMIC = 3 } emu_access;
/* Records an access to bytes `first` to `last` of one granule; returns the earlier access that it races with, or 0 if
 * it races with none. Atomic updates do not race with each other. */
uint64_t emu_history_note(emu_history *history, const emu_clock *clock, uint32_t first, uint32_t last,
                          emu_access access);
/* Store the name of an operation, and describe an access for a report: "copy to the host of stream 2". */
void emu_clock_name(const emu_clock *clock, const char *name);
void emu_clock_describe(uint64_t access, char *text, size_t text_bytes);

/* ---- the clocks of streams ---- */
/* emu_clock_tick begins a new operation of the stream and returns its clock; emu_clock_snapshot returns the stream's
 * present clock. The caller frees both. emu_clock_join orders the stream's later operations after those in `clock`. */
emu_clock *emu_clock_tick(CUstream stream);
emu_clock *emu_clock_snapshot(CUstream stream);
void emu_clock_join(CUstream stream, const emu_clock *clock);
/* Records that the host has waited for all operations in the clock. */
void emu_clock_host_waits(const emu_clock *clock);
/* Returns the operations that the host has waited for; the caller frees the clock. NULL outside of the checking mode.
 */
emu_clock *emu_clock_of_host(void);
/* Orders the operation of *clock after those in `other`, too. Ignores NULL clocks. */
void emu_clock_follow(emu_clock **clock, const emu_clock *other);
void emu_clock_free(emu_clock *clock);
void emu_clock_end(CUstream stream); /* the stream is about to be destroyed */

#endif
