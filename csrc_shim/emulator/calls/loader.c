/* Loads relocatable ELF objects for the host's CPU, the format of kernels that the compile pipeline makes for the
 * emulated device.
 *
 * The bytes come from a cache file that may be damaged or hostile, so every offset, index and size is checked before it
 * is used, and the loader's work is bounded by the length of the file. What the code does when it runs is not checked.
 * Sections go into one mapping: code first, then read-only data, then writable data. No page is ever writable and
 * executable at once. */
#include "emulator/calls/loader.h"

#include <elf.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "driver/driver.h"
#include "emulator/calls/symbols.h"
#include "emulator/host/cpu.h"
#include "emulator/host/relocation.h"
#include "emulator/module.h"
#include "emulator/state.h"
#include "emulator/work/capture.h"
#include "emulator/work/queue.h"

#define MAX_IMAGE ((size_t)64 << 20)
#define MAX_MAPPING (4 * (uint64_t)MAX_IMAGE)
#define MAX_ALIGN EMU_PAGE

/* A string table; its last byte is 0. */
typedef struct strings {
  const char *text;
  size_t bytes;
} strings;

typedef struct loader {
  const uint8_t *image;
  size_t image_bytes;
  const Elf64_Ehdr *header;
  const Elf64_Shdr *sections;
  uint32_t num_sections;
  uint8_t **placed; /* address of each section in the mapping, NULL where it has none */
  const Elf64_Sym *symbols;
  uint32_t num_symbols, symbol_table; /* number of symbols; index of the symbol table's section */
  strings strings;                    /* names of the symbols */
  strings section_names;              /* empty where there are none */
  emu_import *imports;                /* one per symbol; used for the undefined ones and as the global offset table */
} loader;

static CUresult bad(const char *what) { return emu_fail(CUDA_ERROR_INVALID_IMAGE, "kernel object: %s", what); }

static const void *slice(const loader *in, uint64_t offset, uint64_t bytes) {
  if (offset > in->image_bytes || bytes > in->image_bytes - offset)
    return NULL;
  return in->image + offset;
}

/* Returns the string at the offset, or NULL if the offset is out of range. */
static const char *string_at(const strings *in, uint32_t offset) {
  return offset < in->bytes ? in->text + offset : NULL;
}

/* Whether the section has bytes in the file. The fields of an unused header (SHT_NULL) have no meaning. */
static bool has_bytes(const Elf64_Shdr *section) {
  return section->sh_type != SHT_NOBITS && section->sh_type != SHT_NULL;
}

static CUresult read_strings(const loader *in, uint32_t index, strings *out) {
  if (index >= in->num_sections || in->sections[index].sh_type != SHT_STRTAB)
    return bad("a string table is missing");
  const Elf64_Shdr *section = &in->sections[index];
  out->text = slice(in, section->sh_offset, section->sh_size);
  out->bytes = section->sh_size;
  if (!out->text || (out->bytes && out->text[out->bytes - 1]))
    return bad("a string table is malformed");
  return CUDA_SUCCESS;
}

static CUresult read_symbols(loader *in, const Elf64_Shdr *section) {
  if (in->symbols)
    return bad("it has two symbol tables");
  in->symbols = slice(in, section->sh_offset, section->sh_size);
  if (!in->symbols || section->sh_entsize != sizeof(Elf64_Sym) || section->sh_offset % 8)
    return bad("its symbol table is malformed");
  in->num_symbols = (uint32_t)(section->sh_size / sizeof(Elf64_Sym));
  in->symbol_table = (uint32_t)(section - in->sections);
  return read_strings(in, section->sh_link, &in->strings);
}

/* Checks the section headers. Sections must not overlap, so their bytes together may not exceed the file's. */
static CUresult read_sections(loader *in) {
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < in->num_sections; i++) {
    const Elf64_Shdr *section = &in->sections[i];
    if (has_bytes(section)) {
      if (!slice(in, section->sh_offset, section->sh_size))
        return bad("a section is out of range");
      bytes += section->sh_size;
      if (bytes > in->image_bytes)
        return bad("its sections overlap");
    }
    if (section->sh_size > MAX_IMAGE || section->sh_addralign > MAX_ALIGN ||
        (section->sh_addralign & (section->sh_addralign - 1)))
      return bad("a section has an impossible size or alignment");
    if (section->sh_flags & (SHF_TLS | SHF_COMPRESSED) && section->sh_flags & SHF_ALLOC)
      return bad("thread-local storage and compressed sections are not supported");
    if (section->sh_type == SHT_REL)
      return bad("relocations without addends are not supported");
    CUresult result = section->sh_type == SHT_SYMTAB ? read_symbols(in, section) : CUDA_SUCCESS;
    if (result)
      return result;
  }
  if (!in->symbols)
    return bad("it has no symbol table");
  return in->header->e_shstrndx == SHN_UNDEF ? CUDA_SUCCESS
                                             : read_strings(in, in->header->e_shstrndx, &in->section_names);
}

static CUresult read_headers(loader *in) {
  if (in->image_bytes < sizeof(Elf64_Ehdr) || in->image_bytes > MAX_IMAGE)
    return bad("its size is invalid");
  if ((uintptr_t)in->image % 8)
    return bad("it is not aligned to 8 bytes");
  in->header = (const Elf64_Ehdr *)in->image;
  if (memcmp(in->header->e_ident, ELFMAG, SELFMAG) || in->header->e_ident[EI_CLASS] != ELFCLASS64 ||
      in->header->e_ident[EI_DATA] != ELFDATA2LSB || in->header->e_type != ET_REL)
    return bad("it is not a relocatable 64-bit ELF object");
  if (in->header->e_machine != emu_host_machine)
    return emu_fail(CUDA_ERROR_INVALID_IMAGE,
                    "kernel object: it is for another CPU (ELF machine %u) than the host's, %s (%u)",
                    in->header->e_machine, emu_host_name, emu_host_machine);
  in->num_sections = in->header->e_shnum;
  in->sections = slice(in, in->header->e_shoff, (uint64_t)in->num_sections * sizeof(Elf64_Shdr));
  if (in->header->e_shentsize != sizeof(Elf64_Shdr) || !in->num_sections || !in->sections || in->header->e_shoff % 8)
    return bad("its section table is out of range");
  if (in->num_sections >= SHN_LORESERVE) /* numbers from here on are reserved values of st_shndx */
    return bad("it has too many sections");
  return read_sections(in);
}

/* Whether the section belongs in the mapping. Unwind tables do not: nothing unwinds through kernels. */
static bool is_loaded(const loader *in, const Elf64_Shdr *section) {
  if (!(section->sh_flags & SHF_ALLOC) || section->sh_size == 0 || section->sh_type == SHT_NULL)
    return false;
  const char *name = string_at(&in->section_names, section->sh_name);
  return !name || strcmp(name, ".eh_frame") != 0;
}

static uint64_t round_up(uint64_t value, uint64_t to) { return (value + to - 1) & ~(to - 1); }

static enum emu_section_group group_of(const Elf64_Shdr *section) {
  return section->sh_flags & SHF_EXECINSTR ? EMU_CODE : section->sh_flags & SHF_WRITE ? EMU_WRITABLE : EMU_CONSTANTS;
}

/* Computes the offset in the mapping of each loaded section, and where each group (code, constants, writable) ends. */
static void lay_out(const loader *in, uint64_t *offsets, uint64_t ends[EMU_NUM_GROUPS]) {
  uint64_t offset = (uint64_t)in->num_symbols * sizeof(emu_import); /* the imports are at the start of the code */
  for (enum emu_section_group group = EMU_CODE; group < EMU_NUM_GROUPS; group++) {
    for (uint32_t i = 0; i < in->num_sections; i++) {
      const Elf64_Shdr *section = &in->sections[i];
      if (!is_loaded(in, section) || group_of(section) != group)
        continue;
      offset = round_up(offset, section->sh_addralign ? section->sh_addralign : 1);
      offsets[i] = offset;
      offset += section->sh_size; /* cannot overflow: fewer than 2^16 sections of at most 2^26 bytes */
    }
    ends[group] = offset = round_up(offset, EMU_PAGE);
  }
}

static CUresult map_sections(loader *in, struct CUmod_st *module, const uint64_t *offsets, const uint64_t *ends) {
  if (!ends[EMU_NUM_GROUPS - 1] || ends[EMU_NUM_GROUPS - 1] > MAX_MAPPING)
    return bad("its size in memory is zero or too large");
  void *mapping = mmap(NULL, ends[EMU_NUM_GROUPS - 1], PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED)
    return emu_fail(CUDA_ERROR_OUT_OF_MEMORY, "no room to load a kernel object of %zu bytes", in->image_bytes);
  module->mapping = mapping;
  module->mapping_bytes = ends[EMU_NUM_GROUPS - 1];
  module->code_bytes = ends[EMU_CODE];
  module->constant_bytes = ends[EMU_CONSTANTS] - ends[EMU_CODE];
  in->imports = mapping;
  for (uint32_t i = 0; i < in->num_sections; i++) {
    const Elf64_Shdr *section = &in->sections[i];
    if (!is_loaded(in, section))
      continue;
    in->placed[i] = module->mapping + offsets[i];
    if (has_bytes(section))
      memcpy(in->placed[i], in->image + section->sh_offset, section->sh_size);
  }
  return CUDA_SUCCESS;
}

static CUresult place_sections(loader *in, struct CUmod_st *module) {
  in->placed = calloc(in->num_sections, sizeof *in->placed);
  uint64_t *offsets = calloc(in->num_sections, sizeof *offsets);
  uint64_t ends[EMU_NUM_GROUPS];
  CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
  if (in->placed && offsets) {
    lay_out(in, offsets, ends);
    result = map_sections(in, module, offsets, ends);
  }
  free(offsets);
  return result;
}

/* Finds the address of a symbol. The error of an unknown symbol names it. */
static CUresult resolve(loader *in, uint32_t index, uint64_t *address) {
  const Elf64_Sym *symbol = &in->symbols[index];
  if (symbol->st_shndx == SHN_ABS) {
    *address = symbol->st_value;
    return CUDA_SUCCESS;
  }
  if (symbol->st_shndx != SHN_UNDEF) {
    if (symbol->st_shndx >= in->num_sections || !in->placed[symbol->st_shndx])
      return bad("a symbol lies in a section that is not loaded");
    if (symbol->st_value > in->sections[symbol->st_shndx].sh_size)
      return bad("a symbol lies outside its section");
    *address = (uint64_t)in->placed[symbol->st_shndx] + symbol->st_value;
    return CUDA_SUCCESS;
  }
  emu_import *import = &in->imports[index];
  if (!import->address) {
    const char *name = string_at(&in->strings, symbol->st_name);
    if (!name || !*name)
      return bad("an undefined symbol has no name");
    const void *found = emu_symbol(name);
    if (!found)
      return emu_fail(CUDA_ERROR_INVALID_IMAGE, "kernel object: undefined symbol \"%s\"", name);
    emu_import_set(import, (uint64_t)found);
  }
  *address = import->address;
  return CUDA_SUCCESS;
}

static CUresult relocate_one(loader *in, uint32_t target, const Elf64_Rela *rela) {
  uint32_t type = ELF64_R_TYPE(rela->r_info), index = (uint32_t)ELF64_R_SYM(rela->r_info);
  if (emu_relocation_is_none(type))
    return CUDA_SUCCESS;
  if (index >= in->num_symbols)
    return bad("a relocation names a symbol that does not exist");
  uint64_t symbol;
  CUresult result = resolve(in, index, &symbol);
  if (result)
    return result;
  uint64_t size = in->sections[target].sh_size;
  if (rela->r_offset > size)
    return bad("a relocation lies outside its section");
  const emu_relocation relocation = {
      .type = type,
      .location = in->placed[target] + rela->r_offset,
      .available = size - rela->r_offset,
      .symbol = symbol,
      .addend = (uint64_t)rela->r_addend,
      .imported = in->symbols[index].st_shndx == SHN_UNDEF,
      .import = &in->imports[index],
  };
  return emu_relocate(&relocation);
}

static CUresult relocate(loader *in) {
  for (uint32_t i = 0; i < in->num_sections; i++) {
    const Elf64_Shdr *section = &in->sections[i];
    if (section->sh_type != SHT_RELA)
      continue;
    if (section->sh_info >= in->num_sections || section->sh_link != in->symbol_table ||
        section->sh_entsize != sizeof(Elf64_Rela) || section->sh_offset % 8)
      return bad("a relocation table is malformed");
    if (!in->placed[section->sh_info])
      continue;
    const Elf64_Rela *relas = (const Elf64_Rela *)(in->image + section->sh_offset);
    for (uint64_t k = 0; k < section->sh_size / sizeof *relas; k++) {
      CUresult result = relocate_one(in, section->sh_info, &relas[k]);
      if (result)
        return result;
    }
  }
  return CUDA_SUCCESS;
}

/* Copies the defined symbols into the module: the image may not outlive the call. */
static CUresult keep_symbols(loader *in, struct CUmod_st *module) {
  module->symbols = calloc(in->num_symbols ? in->num_symbols : 1, sizeof *module->symbols);
  module->strings = malloc(in->strings.bytes + 1);
  if (!module->symbols || !module->strings)
    return CUDA_ERROR_OUT_OF_MEMORY;
  memcpy(module->strings, in->strings.text, in->strings.bytes);
  for (uint32_t i = 0; i < in->num_symbols; i++) {
    const Elf64_Sym *symbol = &in->symbols[i];
    const char *name = string_at(&in->strings, symbol->st_name);
    uint64_t address;
    if (symbol->st_shndx == SHN_UNDEF || symbol->st_shndx >= in->num_sections || !in->placed[symbol->st_shndx] ||
        ELF64_ST_TYPE(symbol->st_info) == STT_SECTION || !name || !*name || resolve(in, i, &address))
      continue;
    const Elf64_Shdr *section = &in->sections[symbol->st_shndx];
    module->symbols[module->num_symbols++] = (struct emu_module_symbol){
        module->strings + symbol->st_name,
        address,
        section->sh_size - symbol->st_value,
        group_of(section),
    };
  }
  return CUDA_SUCCESS;
}

static void destroy(struct CUmod_st *module) {
  for (struct CUfunc_st *function = module->functions, *next; function; function = next) {
    next = function->next;
    free(function);
  }
  if (module->mapping)
    munmap(module->mapping, module->mapping_bytes);
  free(module->symbols);
  free(module->strings);
  pthread_mutex_destroy(&module->lock);
  free(module);
}

CUresult emu_object_load(CUmodule *out, emu_device *device, const void *image, size_t image_bytes) {
  struct CUmod_st *module = calloc(1, sizeof *module);
  if (!module)
    return CUDA_ERROR_OUT_OF_MEMORY;
  module->device = device;
  pthread_mutex_init(&module->lock, NULL);
  loader in = {.image = image, .image_bytes = image_bytes};
  CUresult result = read_headers(&in);
  if (!result)
    result = place_sections(&in, module);
  if (!result)
    result = relocate(&in);
  if (!result)
    result = keep_symbols(&in, module);
  if (!result)
    __builtin___clear_cache((char *)module->mapping, (char *)module->mapping + module->code_bytes);
  if (!result &&
      (mprotect(module->mapping, module->code_bytes, PROT_READ | PROT_EXEC) ||
       (module->constant_bytes && mprotect(module->mapping + module->code_bytes, module->constant_bytes, PROT_READ))))
    result = emu_fail(CUDA_ERROR_UNKNOWN, "the system does not allow kernel code to be mapped as executable");
  free(in.placed);
  if (result) {
    destroy(module);
    return result;
  }
  atomic_fetch_add(&emu.live, 1);
  *out = module;
  return CUDA_SUCCESS;
}

CUresult emu_module_unload(CUmodule module) {
  CUresult result = emu_leave();
  if (result || (result = emu_capture_unsafe()))
    return result;
  if (!module)
    return CUDA_ERROR_INVALID_HANDLE;
  emu_queue_run_all(); /* queued launches need the module's code, for example after a failed synchronization */
  destroy(module);
  atomic_fetch_sub(&emu.live, 1);
  return emu_lost();
}

static const struct emu_module_symbol *find_symbol(const struct CUmod_st *module, const char *name,
                                                   const char *suffix) {
  size_t length = strlen(name);
  for (size_t i = 0; i < module->num_symbols; i++) {
    const char *candidate = module->symbols[i].name;
    if (strncmp(candidate, name, length) == 0 && strcmp(candidate + length, suffix) == 0)
      return &module->symbols[i];
  }
  return NULL;
}

static CUresult check_meta(const char *name, const struct emu_module_symbol *symbol) {
  if (!symbol || symbol->group != EMU_CONSTANTS || symbol->bytes < sizeof(ocp_emu_kernel_meta) ||
      symbol->value % _Alignof(ocp_emu_kernel_meta))
    return emu_fail(CUDA_ERROR_NOT_FOUND, "kernel object: no valid \"%s.meta\"", name);
  const ocp_emu_kernel_meta *meta = (const ocp_emu_kernel_meta *)symbol->value;
  if (meta->version != OCP_EMU_META_VERSION || meta->mode > OCP_EMU_FIBER || meta->num_params > OCP_EMU_MAX_PARAMS ||
      meta->static_shared_bytes > EMU_DEFAULT_SHARED || meta->stack_bytes > 1u << 20)
    return emu_fail(CUDA_ERROR_INVALID_IMAGE, "kernel object: \"%s.meta\" is malformed or of another version", name);
  for (uint32_t i = 0; i < meta->num_params; i++) {
    uint8_t kind = meta->params[i];
    if (kind != OCP_EMU_PARAM_POINTER && kind != 1 && kind != 2 && kind != 4 && kind != 8)
      return emu_fail(CUDA_ERROR_INVALID_IMAGE, "kernel object: parameter %u of \"%s\" has no known kind", i, name);
  }
  return CUDA_SUCCESS;
}

static CUresult get_function(CUfunction *out, CUmodule module, const char *name) {
  for (struct CUfunc_st *function = module->functions; function; function = function->next)
    if (strcmp(function->name, name) == 0) {
      *out = function;
      return CUDA_SUCCESS;
    }
  const struct emu_module_symbol *entry = find_symbol(module, name, "");
  if (!entry || entry->group != EMU_CODE || !entry->bytes)
    return emu_fail(CUDA_ERROR_NOT_FOUND, "kernel object: no kernel \"%s\"", name);
  const struct emu_module_symbol *meta = find_symbol(module, name, ".meta");
  CUresult result = check_meta(name, meta);
  if (result)
    return result;
  struct CUfunc_st *function = calloc(1, sizeof *function);
  if (!function)
    return CUDA_ERROR_OUT_OF_MEMORY;
  function->module = module;
  function->entry = (void (*)(const void *const *, ocp_emu_thread *))entry->value;
  function->meta = (const ocp_emu_kernel_meta *)meta->value;
  function->name = entry->name;
  function->max_dynamic_shared = EMU_DEFAULT_SHARED - function->meta->static_shared_bytes;
  function->next = module->functions;
  module->functions = *out = function;
  return CUDA_SUCCESS;
}

CUresult emu_module_get_function(CUfunction *function, CUmodule module, const char *name) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (result)
    return result;
  if (!function || !module || !name)
    return CUDA_ERROR_INVALID_VALUE;
  pthread_mutex_lock(&module->lock);
  result = get_function(function, module, name);
  pthread_mutex_unlock(&module->lock);
  return result;
}
