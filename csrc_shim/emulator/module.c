#include "emulator/module.h"

bool emu_module_owns(const struct CUmod_st *module, uint64_t address, uint64_t bytes, bool loads) {
  uint64_t offset = address - (uint64_t)module->mapping, first = module->code_bytes;
  first += loads ? 0 : module->constant_bytes;
  return offset >= first && offset < module->mapping_bytes && bytes <= module->mapping_bytes - offset;
}
