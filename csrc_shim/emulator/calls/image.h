/* Members of the driver table: loading modules from objects, PTX and fatbins. */
#ifndef OCP_EMULATOR_CALLS_IMAGE_H
#define OCP_EMULATOR_CALLS_IMAGE_H

#include <stddef.h>
#include <stdint.h>

#include "driver/driver.h"

typedef void (*emu_deliver_fn)(void *context, const void *object, uint64_t bytes);
/* Compiles PTX or a fatbin into an ELF object (kernel.h) and passes it to `deliver`. Returns 0, or another number with
 * the reason in `text`. */
typedef int (*emu_translate_fn)(const void *image, size_t bytes, emu_deliver_fn deliver, void *context, char *text,
                                size_t text_bytes);

/* Sets the compiler of PTX, which Python implements. Until then PTX and fatbins are refused. */
void emu_use_translator(emu_translate_fn translate);
CUresult emu_module_load(CUmodule *module, const void *image, size_t image_bytes);

#endif
