/* The checking mode: a state for every byte of device memory, vector clocks, findings. All of it is idle, and every
 * function returns at once, while config.check is 0. */
#ifndef OCP_EMULATOR_CHECK_H
#define OCP_EMULATOR_CHECK_H

#include "emulator/internal.h"

/* ---- shadow.c: what each byte of device memory is ---- */
enum { EMU_BYTE_ALLOCATED = 1, EMU_BYTE_WRITTEN = 2, EMU_BYTE_FREED = 4 };

/* Starts with all live allocations counted as written; 0, or -1 when the tables cannot be mapped. */
int emu_shadow_start(void);
void emu_shadow_stop(void); /* also frees what is in quarantine */
void emu_shadow_allocated(uint64_t address, uint64_t bytes);
/* Keeps the block from being used again for a while; false: it was freed before. */
bool emu_shadow_free(emu_device *device, uint64_t address, uint64_t bytes);
/* Frees what is in quarantine, for an allocation that finds no room; false: nothing was. */
bool emu_shadow_flush(emu_device *device);
uint64_t emu_shadow_quarantined(const emu_device *device);
void emu_shadow_reused(uint64_t address, uint64_t bytes, uint64_t held);
bool emu_shadow_is_freed(uint64_t address);
void emu_shadow_written(uint64_t address, uint64_t bytes);
void emu_shadow_copied(uint64_t dst, uint64_t src, uint64_t bytes);
/* The first byte of the range that is not in all of these states, as an offset; `bytes` when there is none. */
uint64_t emu_shadow_first_not(uint64_t address, uint64_t bytes, uint8_t states);
/* Whether every byte is allocated and written: what nearly every access finds. */
bool emu_shadow_is_written(uint64_t address, uint32_t bytes);
uint8_t emu_shadow_state(uint64_t address);

/* ---- clock.c: which operations happen before which ---- */
struct emu_clock {
  uint32_t slot, time; /* the operation: number of its stream, and its own number there */
  uint32_t count;
  uint32_t times[]; /* of each stream, the last operation known to be done */
};
/* The last accesses to a granule of device memory: slot, time, and the bytes of the granule. */
typedef struct emu_history {
  _Atomic uint64_t write, atomic, reads[2];
} emu_history;
typedef enum emu_access { EMU_LOAD = 1, EMU_STORE = 2, EMU_ATOMIC = 3 } emu_access;
/* Notes an access inside one granule; returns the earlier access that it is not ordered with, or 0. Atomic updates need
 * no order among themselves. */
uint64_t emu_history_note(emu_history *history, const emu_clock *clock, uint32_t first, uint32_t last,
                          emu_access access);
/* Names an operation for later reports, and finds that name again. */
void emu_clock_name(const emu_clock *clock, const char *name);
void emu_clock_describe(uint64_t access, char *text, size_t text_bytes);
emu_history *emu_history_of(uint64_t address); /* in shadow.c */

/* ---- check.c: findings, and the checks of operations ---- */
/* Before an operation runs; a result other than 0 is that of the operation. */
CUresult emu_check_op(const emu_op *op, const emu_clock *clock);

#endif
