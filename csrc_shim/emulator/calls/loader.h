/* Loads ELF objects of the compile pipeline as modules, unloads modules, and looks up their kernels. */
#ifndef OCP_EMULATOR_CALLS_LOADER_H
#define OCP_EMULATOR_CALLS_LOADER_H

#include "driver/driver.h"
#include "emulator/state.h"

CUresult emu_object_load(CUmodule *module, emu_device *device, const void *image, size_t image_bytes);
CUresult emu_module_unload(CUmodule module);
CUresult emu_module_get_function(CUfunction *function, CUmodule module, const char *name);

#endif
