/* The checking mode's shadow memory, which has the state of each byte of device memory, and its quarantine, which
 * delays the reuse of freed blocks. While config.check is 0, emu_shadow_allocated, _imported, _reused, _flush,
 * _quarantined and _is_freed do nothing, and emu_shadow_free and the functions for states and histories of bytes must
 * not be called. */
#ifndef OCP_EMULATOR_SHADOW_H
#define OCP_EMULATOR_SHADOW_H

#include <stdbool.h>
#include <stdint.h>

#include "emulator/clock.h"
#include "emulator/state.h"

enum { EMU_BYTE_ALLOCATED = 1, EMU_BYTE_WRITTEN = 2, EMU_BYTE_FREED = 4 };

/* The byte that the checking mode fills unwritten memory with: NaN in every floating-point type, -1 as an index. */
enum { EMU_UNWRITTEN = 0xff };

/* Makes the shadow memory; all allocations that exist count as written. Returns 0, or -1 if it cannot be mapped. */
int emu_shadow_start(void);
void emu_shadow_stop(void); /* also frees the blocks in quarantine */
void emu_shadow_allocated(uint64_t address, uint64_t bytes);
/* Marks memory that was mapped from outside: allocated and written. */
void emu_shadow_imported(uint64_t address, uint64_t bytes);
/* Puts the block into quarantine; false: the block was freed before, or host memory is exhausted. */
bool emu_shadow_free(emu_device *device, uint64_t address, uint64_t bytes);
/* Frees the blocks in quarantine, for an allocation that finds no room; false: the quarantine was empty. */
bool emu_shadow_flush(emu_device *device);
uint64_t emu_shadow_quarantined(const emu_device *device);
/* Marks the first `bytes` bytes of a block of `held` bytes as allocated and unwritten, and its other bytes as not
 * allocated. */
void emu_shadow_reused(uint64_t address, uint64_t bytes, uint64_t held);
bool emu_shadow_is_freed(uint64_t address);
void emu_shadow_written(uint64_t address, uint64_t bytes);
void emu_shadow_copied(uint64_t dst, uint64_t src, uint64_t bytes);
/* Returns the offset of the first byte in the range whose state lacks one or more of the bits `states`; `bytes` if
 * there is none. */
uint64_t emu_shadow_first_not(uint64_t address, uint64_t bytes, uint8_t states);
/* Whether every byte is allocated and written. A fast path: nearly every access passes this check. */
bool emu_shadow_is_written(uint64_t address, uint32_t bytes);
uint8_t emu_shadow_state(uint64_t address);

/* The last plain (not volatile, atomic or ordered) accesses to 4 bytes of device memory, as blocks/global_order.c packs
 * them. */
typedef struct emu_word {
  _Atomic uint64_t written, read;
} emu_word;
emu_word *emu_shadow_word(uint64_t address);
void emu_shadow_forget_words(void);

/* Returns the record of the last accesses to the granule (EMU_GRANULE bytes) that contains the address. */
emu_history *emu_history_of(uint64_t address);

#endif
