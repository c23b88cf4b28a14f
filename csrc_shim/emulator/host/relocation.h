/* Relocations of kernel objects (relocatable ELF) for the host's CPU. */
#ifndef OCP_EMULATOR_HOST_RELOCATION_H
#define OCP_EMULATOR_HOST_RELOCATION_H

#include <stdbool.h>
#include <stdint.h>

#include "driver/driver.h"

/* An undefined symbol: its address, and a jump to that address. Calls go to the jump, since a call reaches only 2 GiB
 * (x86-64) or 128 MiB (aarch64). The address also serves as the symbol's entry of the global offset table. */
typedef struct emu_import {
  uint64_t address;
  uint8_t jump[8]; /* code that jumps to `address`, which lies just before it */
} emu_import;

/* One relocation whose symbol is resolved. */
typedef struct emu_relocation {
  uint32_t type;
  uint8_t *location;  /* the bytes to change */
  uint64_t available; /* bytes from `location` to the end of its section */
  uint64_t symbol;    /* address of the symbol */
  uint64_t addend;
  bool imported;      /* the symbol is undefined in the object */
  emu_import *import; /* the symbol's import; where the symbol is defined, only its `address` may be used */
} emu_relocation;

/* e_machine of the ELF objects that the host's CPU runs, and the CPU's name. */
extern const uint16_t emu_host_machine;
extern const char emu_host_name[];

void emu_import_set(emu_import *import, uint64_t address);
/* Whether relocations of this type change nothing. */
bool emu_relocation_is_none(uint32_t type);
/* Applies the relocation. Errors: an unknown type, a location outside the section, a value that does not fit. */
CUresult emu_relocate(const emu_relocation *relocation);

#endif
