/* Fault injection: makes chosen calls fail, of the emulated driver and of the C library by the plugin's library. A test
 * loads this object into the process; the plugin does not know about it. It replaces the members of the driver's table,
 * and the library's imported addresses, by functions that count calls, fail as told, or call the real function. The
 * fake vendor libraries call faults_library_fails. tests/harness/faults.py writes faults_driver.h from driver.h and the
 * fake libraries: the replacements of the driver's functions, and the names of all functions. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <execinfo.h>
#include <link.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "device/device.h"
#include "driver/driver.h"
#include "emulator/state.h"

#define EXPORT __attribute__((visibility("default")))

/* Modes of an armed fault: one call fails; that call and all later ones fail; one call fails and its device is lost. */
enum { FAULT_ONCE, FAULT_FROM_THEN_ON, FAULT_STICKY };
enum { MAX_FUNCTIONS = 256, MAX_FRAMES = 24 };

static atomic_long calls[MAX_FUNCTIONS];
static struct {
  int function, code, mode;
  long at; /* number of the call that fails, from 1 */
  bool has_effect;
} armed = {.function = -1};
static atomic_long fired, host_blocks, locks;
static void *frames[MAX_FRAMES];
static int num_frames;
static emu_state *state;
static ocp_driver real;
static uintptr_t library_base, library_end;

static void lose_device(void) {
  CUcontext context = NULL;
  int healthy = CUDA_SUCCESS;
  if (real.CtxGetCurrent(&context) == CUDA_SUCCESS && context)
    atomic_compare_exchange_strong(&context->error, &healthy, armed.code);
}

/* Counts this call; returns the error code with which it must fail, or 0. */
static int strikes(int function) {
  const long number = atomic_fetch_add(&calls[function], 1) + 1;
  if (function != armed.function || number < armed.at || (armed.mode != FAULT_FROM_THEN_ON && number > armed.at))
    return 0;
  if (atomic_fetch_add(&fired, 1) == 0)
    num_frames = backtrace(frames, MAX_FRAMES);
  if (armed.mode == FAULT_STICKY)
    lose_device();
  return armed.code;
}

/* Whether a failing call also calls the real function. After a sticky error it does: the driver itself decides what
 * still works. */
static bool has_effect(void) { return armed.has_effect || armed.mode == FAULT_STICKY; }

#include "faults_driver.h"

/* ---- the C library ---- */

static void *faulty_malloc(size_t bytes) {
  errno = ENOMEM;
  void *block = strikes(FAULT_malloc) ? NULL : malloc(bytes);
  atomic_fetch_add(&host_blocks, block != NULL);
  return block;
}

static void *faulty_calloc(size_t count, size_t bytes) {
  errno = ENOMEM;
  void *block = strikes(FAULT_calloc) ? NULL : calloc(count, bytes);
  atomic_fetch_add(&host_blocks, block != NULL);
  return block;
}

static void *faulty_realloc(void *old, size_t bytes) {
  errno = ENOMEM;
  void *block = strikes(FAULT_realloc) ? NULL : realloc(old, bytes);
  atomic_fetch_add(&host_blocks, block != NULL && !old);
  return block;
}

static char *faulty_strdup(const char *text) {
  errno = ENOMEM;
  char *block = strikes(FAULT_strdup) ? NULL : strdup(text);
  atomic_fetch_add(&host_blocks, block != NULL);
  return block;
}

static void faulty_free(void *block) {
  atomic_fetch_sub(&host_blocks, block != NULL);
  free(block);
}

static void *faulty_mmap(void *address, size_t bytes, int protection, int flags, int file, off_t offset) {
  errno = ENOMEM;
  return strikes(FAULT_mmap) ? MAP_FAILED : mmap(address, bytes, protection, flags, file, offset);
}

static int faulty_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                                 void *argument) {
  return strikes(FAULT_pthread_create) ? EAGAIN : pthread_create(thread, attributes, run, argument);
}

static int faulty_pthread_setspecific(pthread_key_t key, const void *value) {
  return strikes(FAULT_pthread_setspecific) ? ENOMEM : pthread_setspecific(key, value);
}

/* Counts locks; never fails. */
static int faulty_pthread_mutex_lock(pthread_mutex_t *mutex) {
  atomic_fetch_add(&locks, 1);
  return pthread_mutex_lock(mutex);
}

#define IMPORT(name) {#name, (void (*)(void))faulty_##name}
static const struct {
  const char *name;
  void (*function)(void);
} imports[] = {
    IMPORT(malloc),
    IMPORT(calloc),
    IMPORT(realloc),
    IMPORT(strdup),
    IMPORT(free),
    IMPORT(mmap),
    IMPORT(pthread_create),
    IMPORT(pthread_setspecific),
    IMPORT(pthread_mutex_lock),
};

/* ---- stand-ins for vendor libraries ---- */

/* Called by the fake libraries at the start of each function: whether this call must fail. */
EXPORT int faults_library_fails(const char *function) {
  for (int i = 0; i < NUM_LIBRARY_FUNCTIONS; i++)
    if (strcmp(library_functions[i], function) == 0)
      return strikes(FIRST_LIBRARY_FUNCTION + i);
  return 0;
}

/* ---- installing ---- */

static int write_pointer(uintptr_t place, uintptr_t value) {
  const uintptr_t page = place & ~(uintptr_t)(sysconf(_SC_PAGESIZE) - 1);
  if (mprotect((void *)page, place + sizeof value - page, PROT_READ | PROT_WRITE))
    return -1;
  memcpy((void *)place, &value, sizeof value);
  return 0;
}

static int exchange(const Elf64_Rela *relocation, const Elf64_Sym *symbols, const char *names) {
  const uint32_t type = ELF64_R_TYPE(relocation->r_info);
  if (type != R_X86_64_JUMP_SLOT && type != R_X86_64_GLOB_DAT && type != R_X86_64_64)
    return 0;
  const char *name = names + symbols[ELF64_R_SYM(relocation->r_info)].st_name;
  for (size_t i = 0; i < sizeof imports / sizeof *imports; i++)
    if (strcmp(name, imports[i].name) == 0)
      return write_pointer(library_base + relocation->r_offset, (uintptr_t)imports[i].function);
  return 0;
}

static int exchange_imports(const struct link_map *library) {
  const Elf64_Sym *symbols = NULL;
  const char *names = NULL;
  const Elf64_Rela *tables[2] = {NULL, NULL};
  size_t bytes[2] = {0, 0};
  for (const Elf64_Dyn *entry = library->l_ld; entry->d_tag != DT_NULL; entry++)
    switch (entry->d_tag) {
    case DT_SYMTAB:
      symbols = (const Elf64_Sym *)entry->d_un.d_ptr;
      break;
    case DT_STRTAB:
      names = (const char *)entry->d_un.d_ptr;
      break;
    case DT_JMPREL:
      tables[0] = (const Elf64_Rela *)entry->d_un.d_ptr;
      break;
    case DT_PLTRELSZ:
      bytes[0] = entry->d_un.d_val;
      break;
    case DT_RELA:
      tables[1] = (const Elf64_Rela *)entry->d_un.d_ptr;
      break;
    case DT_RELASZ:
      bytes[1] = entry->d_un.d_val;
      break;
    }
  for (int table = 0; table < 2; table++)
    for (size_t i = 0; i < bytes[table] / sizeof **tables; i++)
      if (exchange(&tables[table][i], symbols, names))
        return -1;
  return 0;
}

/* Replaces the members of the emulator's driver table and the imports of its library. Call once in a process. Returns
 * 0, or -1 on failure. */
EXPORT int faults_install(ocp_driver *table) {
  Dl_info info;
  struct link_map *library = NULL;
  CUresult (*init)(unsigned flags) = table->Init;
  void *address = NULL;
  memcpy(&address, &init, sizeof address);
  void *warm[1];
  (void)backtrace(warm, 1); /* backtrace loads libgcc now, not in a failing call */
  if (!dladdr1(address, &info, (void **)&library, RTLD_DL_LINKMAP))
    return -1;
  library_base = library->l_addr;
  library_end = (uintptr_t)library->l_ld + ((uintptr_t)1 << 20);
  real = *table;
  for (size_t i = 0; i < NUM_DRIVER_FUNCTIONS; i++)
    if (write_pointer((uintptr_t)table + driver_functions[i].offset, (uintptr_t)driver_functions[i].function))
      return -1;
  return exchange_imports(library);
}

/* ---- for the test ---- */

/* Makes call number `at` of a function, counted from now on, fail with `code`; function -1: none. Resets the counts. */
EXPORT void faults_arm(int function, long at, int code, int mode, int with_effect) {
  armed.function = -1;
  for (int i = 0; i < MAX_FUNCTIONS; i++)
    atomic_store(&calls[i], 0);
  atomic_store(&fired, 0);
  atomic_store(&locks, 0);
  num_frames = 0;
  armed.at = at;
  armed.code = code;
  armed.mode = mode;
  armed.has_effect = with_effect;
  armed.function = function;
}

EXPORT void faults_disarm(void) { armed.function = -1; }

EXPORT long faults_calls(int function) { return atomic_load(&calls[function]); }
EXPORT long faults_fired(void) { return atomic_load(&fired); }
/* Returns the number of mutexes that the library has locked since faults_arm. */
EXPORT long faults_locks(void) { return atomic_load(&locks); }

/* Writes the callers of the function that failed first, innermost first, as offsets in the plugin's library; returns
 * their number. */
EXPORT int faults_callers(uint64_t *offsets, int most) {
  int count = 0;
  for (int i = 0; i < num_frames && count < most; i++) {
    const uintptr_t frame = (uintptr_t)frames[i];
    if (frame >= library_base && frame < library_end)
      offsets[count++] = frame - library_base - 1;
  }
  return count;
}

/* Returns in `usage` the emulator's live objects, the bytes of device memory in use, and the blocks of host memory that
 * the library has allocated and not freed. */
EXPORT void faults_usage(const ocp_device *device, int64_t usage[3]) {
  state = (emu_state *)(void *)((char *)(device->context - device->ordinal) - offsetof(emu_state, devices));
  usage[0] = atomic_load(&state->live);
  usage[1] = (int64_t)device->context->heap.used;
  usage[2] = atomic_load(&host_blocks);
}

/* Returns the device's sticky error; 0: none. */
EXPORT int faults_device_lost(const ocp_device *device) { return atomic_load(&device->context->error); }

/* Clears a device's sticky error. Outside of tests, only a new process does so. */
EXPORT void faults_heal(ocp_device *device) {
  atomic_store(&device->context->error, CUDA_SUCCESS);
  atomic_store(&device->lost, CUDA_SUCCESS);
}
