/* Modules: kernel objects loaded as the driver loads a cubin. */
#ifndef OCP_EMULATOR_LOADER_H
#define OCP_EMULATOR_LOADER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "emulator/kernel.h"

struct CUfunc_st {
  struct CUmod_st *module;
  void (*entry)(const void *const *params, ocp_emu_thread *thread);
  const ocp_emu_kernel_meta *meta;
  const char *name;
  uint32_t max_dynamic_shared;
  _Atomic uint32_t ticks_per_block; /* cost estimate that decides whether to wake workers; 0: not known yet */
  struct CUfunc_st *next;
};
/* Whether the range lies in the module's data. */
bool emu_module_owns(const struct CUmod_st *module, uint64_t address, uint64_t bytes);

#endif
