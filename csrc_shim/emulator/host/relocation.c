#include "emulator/host/relocation.h"

#include <elf.h>
#include <string.h>

#include "emulator/state.h"

static CUresult bad(const char *what) { return emu_fail(CUDA_ERROR_INVALID_IMAGE, "kernel object: %s", what); }
static CUresult outside(void) { return bad("a relocation lies outside its section"); }
static CUresult unknown(uint32_t type) {
  return emu_fail(CUDA_ERROR_INVALID_IMAGE, "kernel object: relocation type %u is not supported", type);
}

#if defined(__x86_64__)

const uint16_t emu_host_machine = EM_X86_64;
const char emu_host_name[] = "x86-64";

void emu_import_set(emu_import *import, uint64_t address) {
  static const uint8_t jump[8] = {0xff, 0x25, 0xf2, 0xff, 0xff, 0xff, 0x90, 0x90}; /* jmp *-14(%rip); nop; nop */
  import->address = address;
  memcpy(import->jump, jump, sizeof jump);
}

bool emu_relocation_is_none(uint32_t type) { return type == R_X86_64_NONE; }

CUresult emu_relocate(const emu_relocation *relocation) {
  const uint32_t type = relocation->type;
  const uint64_t width = type == R_X86_64_64 || type == R_X86_64_PC64 ? 8 : 4;
  if (width > relocation->available)
    return outside();
  uint64_t symbol = relocation->symbol;
  bool relative = false;
  switch (type) {
  case R_X86_64_64:
  case R_X86_64_32:
  case R_X86_64_32S:
    break;
  case R_X86_64_PC32:
  case R_X86_64_PLT32:
    if (relocation->imported)
      symbol = (uint64_t)relocation->import->jump;
    relative = true;
    break;
  case R_X86_64_PC64:
    relative = true;
    break;
  case R_X86_64_GOTPCREL:
  case R_X86_64_GOTPCRELX:
  case R_X86_64_REX_GOTPCRELX:
    relocation->import->address = symbol;
    symbol = (uint64_t)&relocation->import->address;
    relative = true;
    break;
  default:
    return unknown(type);
  }
  uint64_t value = symbol + relocation->addend - (relative ? (uint64_t)relocation->location : 0);
  if (width == 4) {
    bool fits = type == R_X86_64_32 ? value == (uint32_t)value : (int64_t)value == (int32_t)value;
    if (!fits)
      return bad("a 32-bit relocation is out of range (compile with the large code model)");
  }
  memcpy(relocation->location, &value, width);
  return CUDA_SUCCESS;
}

#elif defined(__aarch64__)

const uint16_t emu_host_machine = EM_AARCH64;
const char emu_host_name[] = "aarch64";

void emu_import_set(emu_import *import, uint64_t address) {
  static const uint32_t jump[2] = {0x58ffffd0, 0xd61f0200}; /* ldr x16, .-8; br x16 */
  import->address = address;
  memcpy(import->jump, jump, sizeof jump);
}

bool emu_relocation_is_none(uint32_t type) { return type == R_AARCH64_NONE || type == 256; /* its former number */ }

/* The bit field of an instruction or a datum that a relocation sets. The relocation's value is an address or, with
 * `relative`, the distance of that address from the location. The field gets the bits of the value from `shift` on. */
typedef struct field {
  uint16_t type;
  uint8_t bytes;    /* 4 for instructions */
  uint8_t position; /* of the field in the instruction */
  uint8_t width;    /* bits of the field */
  uint8_t shift;
  bool relative;
  uint8_t signed_bits; /* the value must fit in a signed number of this many bits; 0: any value fits */
} field;

static const field fields[] = {
    {R_AARCH64_ABS64, 8, 0, 64, 0, false, 0},
    {R_AARCH64_ABS32, 4, 0, 32, 0, false, 33},
    {R_AARCH64_PREL64, 8, 0, 64, 0, true, 0},
    {R_AARCH64_PREL32, 4, 0, 32, 0, true, 32},
    {R_AARCH64_MOVW_UABS_G0, 4, 5, 16, 0, false, 17},
    {R_AARCH64_MOVW_UABS_G0_NC, 4, 5, 16, 0, false, 0},
    {R_AARCH64_MOVW_UABS_G1, 4, 5, 16, 16, false, 33},
    {R_AARCH64_MOVW_UABS_G1_NC, 4, 5, 16, 16, false, 0},
    {R_AARCH64_MOVW_UABS_G2, 4, 5, 16, 32, false, 49},
    {R_AARCH64_MOVW_UABS_G2_NC, 4, 5, 16, 32, false, 0},
    {R_AARCH64_MOVW_UABS_G3, 4, 5, 16, 48, false, 0},
    {R_AARCH64_LD_PREL_LO19, 4, 5, 19, 2, true, 21},
    {R_AARCH64_CONDBR19, 4, 5, 19, 2, true, 21},
    {R_AARCH64_TSTBR14, 4, 5, 14, 2, true, 16},
    {R_AARCH64_JUMP26, 4, 0, 26, 2, true, 28},
    {R_AARCH64_CALL26, 4, 0, 26, 2, true, 28},
    {R_AARCH64_ADD_ABS_LO12_NC, 4, 10, 12, 0, false, 0},
    {R_AARCH64_LDST8_ABS_LO12_NC, 4, 10, 12, 0, false, 0},
    {R_AARCH64_LDST16_ABS_LO12_NC, 4, 10, 11, 1, false, 0},
    {R_AARCH64_LDST32_ABS_LO12_NC, 4, 10, 10, 2, false, 0},
    {R_AARCH64_LDST64_ABS_LO12_NC, 4, 10, 9, 3, false, 0},
    {R_AARCH64_LDST128_ABS_LO12_NC, 4, 10, 8, 4, false, 0},
    {R_AARCH64_LD64_GOT_LO12_NC, 4, 10, 9, 3, false, 0},
};

static void set_bits(uint8_t *location, uint32_t position, uint32_t width, uint64_t value) {
  uint32_t instruction, mask = ((uint32_t)1 << width) - 1;
  memcpy(&instruction, location, sizeof instruction);
  instruction = (instruction & ~(mask << position)) | ((uint32_t)value & mask) << position;
  memcpy(location, &instruction, sizeof instruction);
}

static bool fits(uint64_t value, uint32_t signed_bits) {
  return !signed_bits || (int64_t)value == (int64_t)(value << (64 - signed_bits)) >> (64 - signed_bits);
}

static CUresult out_of_range(void) { return bad("a relocation is out of range (compile with the large code model)"); }

/* ADR and ADRP take a signed number of 21 bits. The instruction stores its lowest two bits apart from the others. */
static CUresult relocate_adr(const emu_relocation *relocation, uint64_t value) {
  if (!fits(value, 21))
    return out_of_range();
  set_bits(relocation->location, 29, 2, value);
  set_bits(relocation->location, 5, 19, value >> 2);
  return CUDA_SUCCESS;
}

static uint64_t page_of(uint64_t address) { return address & ~(uint64_t)4095; /* what ADRP calls a page */ }

CUresult emu_relocate(const emu_relocation *relocation) {
  const uint32_t type = relocation->type;
  if (relocation->available < 4)
    return outside();
  uint64_t symbol = relocation->symbol;
  const uint64_t location = (uint64_t)relocation->location;
  if ((type == R_AARCH64_CALL26 || type == R_AARCH64_JUMP26) && relocation->imported)
    symbol = (uint64_t)relocation->import->jump;
  if (type == R_AARCH64_ADR_GOT_PAGE || type == R_AARCH64_LD64_GOT_LO12_NC) {
    relocation->import->address = symbol;
    symbol = (uint64_t)&relocation->import->address;
  }
  const uint64_t target = symbol + relocation->addend;
  if (type == R_AARCH64_ADR_PREL_LO21)
    return relocate_adr(relocation, target - location);
  if (type == R_AARCH64_ADR_PREL_PG_HI21 || type == R_AARCH64_ADR_GOT_PAGE)
    return relocate_adr(relocation, (uint64_t)((int64_t)(page_of(target) - page_of(location)) >> 12));
  for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
    const field *known = &fields[i];
    if (known->type != type)
      continue;
    if (relocation->available < known->bytes)
      return outside();
    const uint64_t value = target - (known->relative ? location : 0);
    if (!fits(value, known->signed_bits))
      return out_of_range();
    if (known->width >= 32)
      memcpy(relocation->location, &value, known->bytes);
    else
      set_bits(relocation->location, known->position, known->width, value >> known->shift);
    return CUDA_SUCCESS;
  }
  return unknown(type);
}

#endif
