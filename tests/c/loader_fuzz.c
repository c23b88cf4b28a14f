/* Fuzzes the loader of the emulated device with damaged kernel objects. Loading an object either fails with a reason,
 * or all its functions are inside of the object. Does not run the kernels. For builds with sanitizers.
 *
 * loader_fuzz load SEED ROUNDS OBJECT...    prints the numbers of refused objects, loaded objects and found kernels
 * loader_fuzz print SEED ROUNDS OBJECT...   writes each damaged object after its length (4 bytes) */
#include <elf.h>
#include <string.h>

#include "base/error.h"
#include "check.h"
#include "damage_object.h"
#include "device/device.h"
#include "device/open/devices.h"
#include "driver/driver.h"
#include "emulator/kernel.h"
#include "emulator/module.h"
#include "emulator/state.h"

enum { MAX_OBJECTS = 16, MAX_NAMES = 1024 };

typedef struct object {
  unsigned char *data;
  size_t bytes;
} object;

static object read_file(const char *path) {
  object out = {.data = malloc(DAMAGE_ROOM)};
  FILE *stream = fopen(path, "rb");
  CHECK(out.data && stream);
  out.bytes = fread(out.data, 1, DAMAGE_ROOM, stream);
  CHECK(out.bytes > sizeof(Elf64_Ehdr) && out.bytes < DAMAGE_ROOM / 2);
  fclose(stream);
  return out;
}

/* Names of the symbols of undamaged objects. */
typedef struct names {
  const char *text[MAX_NAMES];
  size_t count;
} names;

static void add_names(names *out, const object *from) {
  const Elf64_Ehdr *header = (const Elf64_Ehdr *)from->data;
  const Elf64_Shdr *sections = (const Elf64_Shdr *)(from->data + header->e_shoff);
  for (size_t i = 0; i < header->e_shnum; i++) {
    const Elf64_Sym *symbols = (const Elf64_Sym *)(from->data + sections[i].sh_offset);
    const char *strings = (const char *)from->data + sections[sections[i].sh_link].sh_offset;
    for (size_t k = 0; sections[i].sh_type == SHT_SYMTAB && k < sections[i].sh_size / sizeof *symbols; k++) {
      CHECK(out->count < MAX_NAMES);
      out->text[out->count++] = strings + symbols[k].st_name;
    }
  }
}

typedef struct counts {
  long refused, loaded, kernels;
} counts;

/* Checks that the kernel's description is inside of the module and readable, and its first instruction readable. */
static void check_kernel(const struct CUmod_st *module, const struct CUfunc_st *function) {
  const ocp_emu_kernel_meta *meta = function->meta;
  CHECK(emu_module_owns(module, (uint64_t)meta, sizeof *meta, /*loads=*/true));
  CHECK(!emu_module_owns(module, (uint64_t)function->entry, 1, /*loads=*/true));
  CHECK(*(const volatile uint8_t *)(uintptr_t)function->entry <= 0xFF);
  CHECK(meta->version == OCP_EMU_META_VERSION && meta->num_params <= OCP_EMU_MAX_PARAMS);
  CHECK(function->max_dynamic_shared <= EMU_DEFAULT_SHARED);
}

static void try_object(const ocp_driver *driver, const object *damaged, const names *names, counts *n) {
  const int live = atomic_load(&emu.live);
  /* An exact copy on the heap, so that a sanitizer sees reads beyond its end. */
  unsigned char *image = malloc(damaged->bytes + !damaged->bytes);
  CHECK(image);
  memcpy(image, damaged->data, damaged->bytes);
  CUmodule module;
  CUresult result = driver->ModuleLoadData(&module, image, damaged->bytes);
  free(image); /* the image does not outlive the call */
  if (result) {
    if (result != CUDA_ERROR_INVALID_IMAGE && result != CUDA_ERROR_OUT_OF_MEMORY)
      fprintf(stderr, "result %d: %s\n", result, emu_last_error());
    CHECK(result == CUDA_ERROR_INVALID_IMAGE || result == CUDA_ERROR_OUT_OF_MEMORY);
    CHECK(emu_last_error()[0]);
    n->refused++;
  } else {
    n->loaded++;
    for (size_t i = 0; i < names->count; i++) {
      CUfunction function;
      result = driver->ModuleGetFunction(&function, module, names->text[i]);
      CHECK(!result || result == CUDA_ERROR_NOT_FOUND || result == CUDA_ERROR_INVALID_IMAGE);
      n->kernels += !result;
      if (!result)
        check_kernel(module, function);
    }
    CHECK(driver->ModuleUnload(module) == CUDA_SUCCESS);
  }
  CHECK(atomic_load(&emu.live) == live);
}

static const ocp_driver *open_emulator(void) {
  ocp_error failure = {0};
  ocp_device *device = ocp_device_open(true, 0, &failure);
  CHECK(device);
  CHECK_OK(!ocp_device_enter(device, error).entered);
  return device->driver;
}

static void print_object(const object *damaged) {
  const uint32_t bytes = (uint32_t)damaged->bytes;
  CHECK(fwrite(&bytes, sizeof bytes, 1, stdout) == 1 && fwrite(damaged->data, 1, bytes, stdout) == bytes);
}

int main(int argc, char **argv) {
  CHECK(argc >= 5 && argc - 4 <= MAX_OBJECTS);
  const bool print = strcmp(argv[1], "print") == 0;
  const ocp_driver *driver = print ? NULL : open_emulator();
  static object objects[MAX_OBJECTS];
  static names names;
  const int num_objects = argc - 4;
  counts whole = {0}, n = {0};
  for (int i = 0; i < num_objects; i++) {
    objects[i] = read_file(argv[4 + i]);
    add_names(&names, &objects[i]);
    if (!print)
      try_object(driver, &objects[i], &names, &whole);
  }
  CHECK(print || (whole.loaded == num_objects && whole.kernels >= num_objects));
  damage_seed(strtoull(argv[2], NULL, 10));
  object damaged = {.data = malloc(DAMAGE_ROOM)};
  CHECK(damaged.data);
  for (long i = 0, rounds = strtol(argv[3], NULL, 10); i < rounds; i++) {
    const object *from = &objects[i % num_objects];
    memcpy(damaged.data, from->data, from->bytes);
    damaged.bytes = damage_object(damaged.data, from->bytes);
    if (print)
      print_object(&damaged);
    else
      try_object(driver, &damaged, &names, &n);
  }
  if (!print)
    printf("refused %ld loaded %ld kernels %ld\n", n.refused, n.loaded, n.kernels);
  for (int i = 0; i < num_objects; i++)
    free(objects[i].data);
  free(damaged.data);
  return 0;
}
