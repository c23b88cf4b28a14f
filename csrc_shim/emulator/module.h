/* Modules: kernel objects in memory, as loader.c mapped them. */
#ifndef OCP_EMULATOR_MODULE_H
#define OCP_EMULATOR_MODULE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "emulator/kernel.h"
#include "emulator/state.h"

/* Groups of sections, in the order in which they lie in the mapping. */
enum emu_section_group { EMU_CODE, EMU_CONSTANTS, EMU_WRITABLE, EMU_NUM_GROUPS };

struct CUmod_st {
  emu_device *device;
  uint8_t *mapping;
  size_t mapping_bytes, code_bytes, constant_bytes; /* code, then constants, then writable data, in whole pages */
  struct emu_module_symbol {
    const char *name; /* points into `strings` */
    uint64_t value;
    uint64_t bytes; /* bytes from `value` to the end of the symbol's section */
    enum emu_section_group group;
  } *symbols;
  size_t num_symbols;
  char *strings;
  pthread_mutex_t lock;
  struct CUfunc_st *functions; /* the functions that cuModuleGetFunction has returned */
};

struct CUfunc_st {
  struct CUmod_st *module;
  void (*entry)(const void *const *params, ocp_emu_thread *thread);
  const ocp_emu_kernel_meta *meta;
  const char *name;
  uint32_t max_dynamic_shared;
  _Atomic uint32_t ticks_per_block; /* cost estimate that decides whether to wake workers; 0: not known yet */
  struct CUfunc_st *next;
};
/* Whether the range lies in the module's writable data or, if the access is a load (`loads`), in its constants. */
bool emu_module_owns(const struct CUmod_st *module, uint64_t address, uint64_t bytes, bool loads);

#endif
