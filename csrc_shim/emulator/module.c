#include "emulator/module.h"

bool emu_module_owns(const struct CUmod_st *module, uint64_t address, uint64_t bytes) {
  uint64_t offset = address - (uint64_t)module->mapping;
  return offset >= module->code_bytes && offset < module->mapping_bytes && bytes <= module->mapping_bytes - offset;
}
