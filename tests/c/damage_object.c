#include "damage_object.h"

#include <elf.h>
#include <stdbool.h>
#include <string.h>

#include "emulator/kernel.h"

static uint64_t random_state;

void damage_seed(uint64_t seed) { random_state = seed * 2 + 1; }

static uint64_t next_random(uint64_t limit) {
  random_state = random_state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return (random_state >> 33) % limit;
}

#define ONE_OF(values) (values)[next_random(sizeof(values) / sizeof *(values))]

/* An object file and its ELF header; num_sections is 0 if the section table is invalid. */
typedef struct view {
  unsigned char *data;
  size_t bytes;
  Elf64_Ehdr header;
  uint64_t num_sections;
} view;

static view look(unsigned char *data, size_t bytes) {
  view v = {.data = data, .bytes = bytes};
  if (bytes < sizeof v.header)
    return v;
  memcpy(&v.header, data, sizeof v.header);
  uint64_t table = v.header.e_shoff, table_bytes = (uint64_t)v.header.e_shnum * sizeof(Elf64_Shdr);
  if (table <= bytes && table_bytes <= bytes - table)
    v.num_sections = v.header.e_shnum;
  return v;
}

static unsigned char *section_at(const view *v, uint64_t index) {
  return v->data + v->header.e_shoff + index * sizeof(Elf64_Shdr);
}

/* Returns a random entry, of entry_bytes bytes, of a random section with this type; NULL: none found. */
static unsigned char *random_entry(const view *v, uint32_t type, uint64_t entry_bytes) {
  for (uint64_t tries = 2 * v->num_sections; tries; tries--) {
    Elf64_Shdr section;
    memcpy(&section, section_at(v, next_random(v->num_sections)), sizeof section);
    if (section.sh_type != type || section.sh_size < entry_bytes || section.sh_offset > v->bytes ||
        section.sh_size > v->bytes - section.sh_offset)
      continue;
    return v->data + section.sh_offset + entry_bytes * next_random(section.sh_size / entry_bytes);
  }
  return NULL;
}

/* Returns a value that is likely to break a reader: an offset or size in the object, a limit of an integer type, or a
 * change of `old`; often plus or minus 1 or 8. */
static uint64_t border(const view *v, uint64_t old) {
  const uint64_t near[] = {0, 0, 1, (uint64_t)-1, 8, (uint64_t)-8};
  const uint64_t numbers[] = {
      0,          1,          2,          3,          8,           16,         24,           64,
      4095,       4096,       4097,       0xFEFF,     SHN_ABS,     SHN_COMMON, SHN_XINDEX,   0x10000,
      0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1ull << 32, 64ull << 20, 1ull << 47, 1ull << 63,   ~0ull,
      v->bytes,   old,        ~old,       old * 2,    old + 4096,  old ^ 1,    v->bytes / 2, v->num_sections,
  };
  switch (next_random(8)) {
  case 0:
    return old ^ 1ull << next_random(64);
  case 1:
    return next_random(v->bytes + 1);
  case 2: { /* the offset or size of a random section */
    if (!v->num_sections)
      return 0;
    Elf64_Shdr section;
    memcpy(&section, section_at(v, next_random(v->num_sections)), sizeof section);
    return (next_random(2) ? section.sh_size : section.sh_offset) + ONE_OF(near);
  }
  default:
    return ONE_OF(numbers) + ONE_OF(near);
  }
}

static void set_field(const view *v, unsigned char *at, size_t width) {
  uint64_t old = 0;
  memcpy(&old, at, width);
  const uint64_t value = border(v, old);
  memcpy(at, &value, width);
}

#define FIELD(type, name) {offsetof(type, name), sizeof(((type *)0)->name)}
typedef struct field {
  uint8_t offset, width;
} field;

static const field header_fields[] = {
    FIELD(Elf64_Ehdr, e_type),      FIELD(Elf64_Ehdr, e_machine), FIELD(Elf64_Ehdr, e_shoff),
    FIELD(Elf64_Ehdr, e_shentsize), FIELD(Elf64_Ehdr, e_shnum),   FIELD(Elf64_Ehdr, e_shstrndx),
};
static const field section_fields[] = {
    FIELD(Elf64_Shdr, sh_name),      FIELD(Elf64_Shdr, sh_type),    FIELD(Elf64_Shdr, sh_flags),
    FIELD(Elf64_Shdr, sh_offset),    FIELD(Elf64_Shdr, sh_offset),  FIELD(Elf64_Shdr, sh_size),
    FIELD(Elf64_Shdr, sh_size),      FIELD(Elf64_Shdr, sh_link),    FIELD(Elf64_Shdr, sh_info),
    FIELD(Elf64_Shdr, sh_addralign), FIELD(Elf64_Shdr, sh_entsize),
};
static const field symbol_fields[] = {
    FIELD(Elf64_Sym, st_name),  FIELD(Elf64_Sym, st_info), FIELD(Elf64_Sym, st_shndx),
    FIELD(Elf64_Sym, st_value), FIELD(Elf64_Sym, st_size),
};
/* The fields of Elf64_Rela: r_offset, the type and the symbol (the two halves of r_info), and r_addend. */
static const field relocation_fields[] = {{0, 8}, {8, 4}, {12, 4}, {16, 8}};

static void damage_section(const view *v) {
  static const uint32_t types[] = {SHT_NULL, SHT_PROGBITS, SHT_SYMTAB, SHT_STRTAB, SHT_RELA,
                                   SHT_HASH, SHT_NOTE,     SHT_NOBITS, SHT_REL,    SHT_SYMTAB_SHNDX};
  unsigned char *section = section_at(v, next_random(v->num_sections));
  const uint32_t type = ONE_OF(types);
  const uint64_t flags = next_random(2 * SHF_TLS);
  switch (next_random(4)) {
  case 0:
    memcpy(section + offsetof(Elf64_Shdr, sh_type), &type, sizeof type);
    break;
  case 1:
    memcpy(section + offsetof(Elf64_Shdr, sh_flags), &flags, sizeof flags);
    break;
  default: {
    const field chosen = ONE_OF(section_fields);
    set_field(v, section + chosen.offset, chosen.width);
  }
  }
}

static void damage_symbol(const view *v, unsigned char *symbol) {
  const uint16_t section = (uint16_t)next_random(v->num_sections);
  const field chosen = ONE_OF(symbol_fields);
  if (next_random(4) == 0)
    memcpy(symbol + offsetof(Elf64_Sym, st_shndx), &section, sizeof section);
  else
    set_field(v, symbol + chosen.offset, chosen.width);
}

static void damage_relocation(const view *v, unsigned char *relocation) {
  const uint32_t type = (uint32_t)next_random(44); /* includes all relocation types of x86-64 */
  const field chosen = ONE_OF(relocation_fields);
  if (next_random(3) == 0)
    memcpy(relocation + 8, &type, sizeof type);
  else
    set_field(v, relocation + chosen.offset, chosen.width);
}

/* Damages bytes of a constant-data section, which also holds the kernels' descriptions (ocp_emu_kernel_meta). */
static void damage_meta(const view *v) {
  unsigned char *entry = random_entry(v, SHT_PROGBITS, sizeof(ocp_emu_kernel_meta));
  if (entry)
    set_field(v, entry + next_random(sizeof(ocp_emu_kernel_meta)), 1 + next_random(4));
}

/* Copies the second entry over the first, or swaps the two. */
static void move_entry(unsigned char *first, unsigned char *second, size_t bytes) {
  unsigned char kept[sizeof(Elf64_Shdr)];
  memcpy(kept, first, bytes);
  memmove(first, second, bytes);
  if (next_random(2))
    memcpy(second, kept, bytes);
}

/* Appends a longer section table to the file: the old sections, and copies of random ones at the end. */
static void grow_sections(view *v) {
  static const uint64_t counts[] = {0, 1, 7, 7, 7, 7, 7, 7, SHN_LORESERVE, SHN_ABS + 1, SHN_COMMON + 1, SHN_XINDEX};
  uint64_t count = ONE_OF(counts), start = (v->bytes + 7) & ~7ull;
  if (count < 8)
    count += v->num_sections;
  if (count < v->num_sections || count > 0xFFFF || start + count * sizeof(Elf64_Shdr) > DAMAGE_ROOM)
    return;
  unsigned char *table = v->data + start;
  memset(v->data + v->bytes, 0, start + count * sizeof(Elf64_Shdr) - v->bytes);
  memcpy(table, section_at(v, 0), v->num_sections * sizeof(Elf64_Shdr));
  for (uint64_t i = count; i > v->num_sections && i > count - 20; i--)
    memcpy(table + (i - 1) * sizeof(Elf64_Shdr), section_at(v, next_random(v->num_sections)), sizeof(Elf64_Shdr));
  v->header.e_shoff = start;
  v->header.e_shnum = (uint16_t)count;
  memcpy(v->data, &v->header, sizeof v->header);
  v->bytes = start + count * sizeof(Elf64_Shdr);
}

static void damage_bytes(const view *v) {
  for (uint64_t i = next_random(4) + 1; i && v->bytes; i--)
    v->data[next_random(v->bytes)] = (unsigned char)next_random(256);
}

static void damage_once(view *v) {
  const uint64_t choice = next_random(64);
  unsigned char *entry = NULL, *other = NULL;
  if (choice < 3) {
    v->bytes = next_random(4) ? next_random(v->bytes + 1) : v->bytes - (v->bytes > 8 ? next_random(8) : 0);
    return;
  }
  if (!v->num_sections || choice < 6) {
    damage_bytes(v);
  } else if (choice < 10) {
    const field chosen = ONE_OF(header_fields);
    set_field(v, v->data + chosen.offset, chosen.width);
  } else if (choice < 28) {
    damage_section(v);
  } else if (choice < 40) {
    if ((entry = random_entry(v, SHT_SYMTAB, sizeof(Elf64_Sym))))
      damage_symbol(v, entry);
  } else if (choice < 52) {
    if ((entry = random_entry(v, SHT_RELA, sizeof(Elf64_Rela))))
      damage_relocation(v, entry);
  } else if (choice < 56) {
    damage_meta(v);
  } else if (choice < 59) {
    move_entry(section_at(v, next_random(v->num_sections)), section_at(v, next_random(v->num_sections)),
               sizeof(Elf64_Shdr));
  } else if (choice < 61) {
    entry = random_entry(v, SHT_SYMTAB, sizeof(Elf64_Sym)), other = random_entry(v, SHT_SYMTAB, sizeof(Elf64_Sym));
    if (entry && other)
      move_entry(entry, other, sizeof(Elf64_Sym));
  } else if (choice < 63) {
    entry = random_entry(v, SHT_RELA, sizeof(Elf64_Rela)), other = random_entry(v, SHT_RELA, sizeof(Elf64_Rela));
    if (entry && other)
      move_entry(entry, other, sizeof(Elf64_Rela));
  } else {
    grow_sections(v);
  }
}

size_t damage_object(unsigned char *data, size_t bytes) {
  for (uint64_t i = 1 + next_random(4); i; i--) {
    view v = look(data, bytes);
    damage_once(&v);
    bytes = v.bytes;
  }
  return bytes;
}
