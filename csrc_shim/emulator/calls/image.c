/* Loads module images. An ELF object of the compile pipeline is loaded as it is. PTX and fatbins are first compiled by
 * Python, as CUDA's driver compiles PTX. A cubin is refused. */
#include "emulator/calls/image.h"

#include <elf.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "emulator/calls/loader.h"
#include "emulator/state.h"
#include "emulator/work/capture.h"

static _Atomic(emu_translate_fn) translator;

void emu_use_translator(emu_translate_fn translate) { atomic_store(&translator, translate); }

typedef enum image_kind { OBJECT, CUBIN, FATBIN, PTX } image_kind;

static image_kind kind_of(const uint8_t *image, size_t bytes) {
  static const uint8_t fatbin[] = {0x50, 0xed, 0x55, 0xba};
  Elf64_Half machine;
  if (bytes >= sizeof(Elf64_Ehdr) && memcmp(image, ELFMAG, SELFMAG) == 0) {
    memcpy(&machine, image + offsetof(Elf64_Ehdr, e_machine), sizeof machine);
    return machine == EM_CUDA ? CUBIN : OBJECT;
  }
  if (bytes >= sizeof fatbin && memcmp(image, fatbin, sizeof fatbin) == 0)
    return FATBIN;
  return bytes && (image[0] == '.' || image[0] == '/' || image[0] == '\n') ? PTX : OBJECT;
}

/* A copy of the ELF object that Python passes to `deliver`. */
typedef struct delivery {
  void *object;
  size_t bytes;
} delivery;

static void deliver(void *context, const void *object, uint64_t bytes) {
  delivery *into = context;
  if ((into->object = malloc(bytes))) { /* malloc aligns to at least 8 bytes, which the loader needs */
    memcpy(into->object, object, bytes);
    into->bytes = bytes;
  }
}

static CUresult load_translated(CUmodule *out, emu_device *device, const void *image, size_t bytes) {
  char text[1000] = "";
  delivery found = {0};
  emu_translate_fn translate = atomic_load(&translator);
  if (!translate)
    return emu_fail(CUDA_ERROR_NO_BINARY_FOR_GPU,
                    "the image is PTX or a fatbin, which only the plugin's compiler in Python can translate for the "
                    "emulated device, and no Python is connected. Call ort_cuda_plugin.register() or create a session "
                    "first");
  CUresult result = CUDA_SUCCESS;
  if (translate(image, bytes, deliver, &found, text, sizeof text))
    result = emu_fail(CUDA_ERROR_INVALID_PTX, "%s", text);
  else if (!found.object)
    result = CUDA_ERROR_OUT_OF_MEMORY;
  else
    result = emu_object_load(out, device, found.object, found.bytes);
  free(found.object);
  return result;
}

CUresult emu_module_load(CUmodule *out, const void *image, size_t image_bytes) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (result || (result = emu_capture_unsafe()))
    return result;
  if (!out || !image)
    return CUDA_ERROR_INVALID_VALUE;
  switch (kind_of(image, image_bytes)) {
  case CUBIN:
    return emu_fail(CUDA_ERROR_NO_BINARY_FOR_GPU,
                    "the image is a cubin, machine code of a GPU, which the emulated device cannot run. Load the PTX "
                    "of the kernel instead");
  case FATBIN:
  case PTX:
    return load_translated(out, device, image, image_bytes);
  default:
    return emu_object_load(out, device, image, image_bytes);
  }
}
