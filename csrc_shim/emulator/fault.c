#include "emulator/fault.h"

#include <fnmatch.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/number.h"
#include "emulator/module.h"
#include "emulator/state.h"

#define VARIABLE "ORT_CUDA_PLUGIN_EMULATE_FAULTS"

static emu_faults faults;

const emu_faults *emu_faults_set(void) { return &faults; }

/* ---- unsupported calls ---- */

static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;
static ocp_driver *attached, supported; /* the emulator's driver table, and a copy without faults */

/* Stands in for a member of the driver table. It takes no parameters: the calling conventions of x86-64 and aarch64
 * leave the arguments to the caller. */
static CUresult refuse(void) {
  return emu_fail(CUDA_ERROR_NOT_SUPPORTED, "the environment variable %s makes this call unsupported", VARIABLE);
}

#define MEMBER(member) {#member, offsetof(ocp_driver, member)}
static const struct {
  const char *name;
  size_t offset;
} members[] = {
    MEMBER(Init),
    MEMBER(DriverGetVersion),
    MEMBER(DeviceGetCount),
    MEMBER(DeviceGet),
    MEMBER(DeviceGetName),
    MEMBER(DeviceGetAttribute),
    MEMBER(DeviceTotalMem),
    MEMBER(DeviceGetPCIBusId),
    MEMBER(DevicePrimaryCtxRetain),
    MEMBER(DevicePrimaryCtxRelease),
    MEMBER(CtxSetCurrent),
    MEMBER(CtxGetCurrent),
    MEMBER(CtxSynchronize),
    MEMBER(CtxEnablePeerAccess),
    MEMBER(DeviceCanAccessPeer),
    MEMBER(MemGetInfo),
    MEMBER(MemAlloc),
    MEMBER(MemFree),
    MEMBER(MemHostAlloc),
    MEMBER(MemFreeHost),
    MEMBER(MemPoolCreate),
    MEMBER(MemPoolDestroy),
    MEMBER(MemPoolSetAttribute),
    MEMBER(MemPoolGetAttribute),
    MEMBER(MemPoolTrimTo),
    MEMBER(MemAllocFromPoolAsync),
    MEMBER(MemFreeAsync),
    MEMBER(MemcpyHtoDAsync),
    MEMBER(MemcpyDtoHAsync),
    MEMBER(MemcpyDtoDAsync),
    MEMBER(MemcpyPeerAsync),
    MEMBER(MemsetD8Async),
    MEMBER(PointerGetAttribute),
    MEMBER(StreamCreate),
    MEMBER(StreamDestroy),
    MEMBER(StreamSynchronize),
    MEMBER(StreamQuery),
    MEMBER(StreamGetCtx),
    MEMBER(StreamWaitEvent),
    MEMBER(EventCreate),
    MEMBER(EventDestroy),
    MEMBER(EventRecord),
    MEMBER(EventSynchronize),
    MEMBER(EventQuery),
    MEMBER(EventElapsedTime),
    MEMBER(ModuleLoadData),
    MEMBER(ModuleUnload),
    MEMBER(ModuleGetFunction),
    MEMBER(FuncSetAttribute),
    MEMBER(LaunchKernel),
    MEMBER(StreamBeginCapture),
    MEMBER(StreamEndCapture),
    MEMBER(StreamIsCapturing),
    MEMBER(ThreadExchangeStreamCaptureMode),
    MEMBER(GraphCreate),
    MEMBER(GraphAddKernelNode),
    MEMBER(GraphAddMemcpyNode),
    MEMBER(GraphAddMemsetNode),
    MEMBER(GraphAddChildGraphNode),
    MEMBER(GraphConditionalHandleCreate),
    MEMBER(GraphAddNode),
    MEMBER(GraphGetNodes),
    MEMBER(GraphNodeGetType),
    MEMBER(GraphInstantiate),
    MEMBER(GraphExecKernelNodeSetParams),
    MEMBER(GraphExecMemcpyNodeSetParams),
    MEMBER(GraphExecMemsetNodeSetParams),
    MEMBER(GraphExecChildGraphNodeSetParams),
    MEMBER(GraphLaunch),
    MEMBER(GraphExecDestroy),
    MEMBER(GraphDestroy),
    MEMBER(ImportExternalMemory),
    MEMBER(ExternalMemoryGetMappedBuffer),
    MEMBER(DestroyExternalMemory),
    MEMBER(ImportExternalSemaphore),
    MEMBER(SignalExternalSemaphoresAsync),
    MEMBER(WaitExternalSemaphoresAsync),
    MEMBER(DestroyExternalSemaphore),
    MEMBER(DeviceGetUuid),
    MEMBER(MemGetAddressRange),
    MEMBER(IpcGetMemHandle),
    MEMBER(IpcOpenMemHandle),
    MEMBER(IpcCloseMemHandle),
    MEMBER(IpcGetEventHandle),
    MEMBER(IpcOpenEventHandle),
};
enum { NUM_MEMBERS = sizeof members / sizeof *members };
_Static_assert(offsetof(ocp_driver, LastErrorText) == (NUM_MEMBERS + 2) * sizeof(void *),
               "every member of CUDA's may be unsupported, except for GetErrorName and GetErrorString");

/* Returns the index of the member with this name; -1: there is none. */
static int find_member(const char *name, size_t length) {
  for (int i = 0; i < NUM_MEMBERS; i++)
    if (strlen(members[i].name) == length && memcmp(members[i].name, name, length) == 0)
      return i;
  return -1;
}

/* Calls `visit` (may be NULL) for each name in a list separated by commas. False: the driver table lacks a name. */
static bool visit_members(const char *list, void (*visit)(int member)) {
  for (const char *name = list; *name;) {
    const size_t length = strcspn(name, ",");
    const int member = find_member(name, length);
    if (member < 0)
      return false;
    if (visit)
      visit(member);
    name += length + (name[length] == ',');
  }
  return true;
}

static void exchange(int member) {
  CUresult (*const function)(void) = refuse;
  memcpy((char *)attached + members[member].offset, &function, sizeof function);
}

static void restore(int member) {
  const size_t offset = members[member].offset;
  memcpy((char *)attached + offset, (const char *)&supported + offset, sizeof(void *));
}

void emu_faults_attach(ocp_driver *table) {
  pthread_mutex_lock(&table_lock);
  if (!attached) {
    attached = table;
    supported = *table;
    visit_members(faults.unsupported, exchange);
  }
  pthread_mutex_unlock(&table_lock);
}

/* ---- settings ---- */

/* Reads "7.5" as 7 and 5. */
static bool read_version(const char *text, int *major, int *minor) {
  char rest;
  return sscanf(text, "%2d.%2d%c", major, minor, &rest) == 2 && *major > 0 && *minor >= 0;
}

/* Reads one setting, "key=value". */
static bool read_setting(const char *key, const char *value, emu_faults *read) {
  uint64_t number = 0;
  int major = 0, minor = 0;
  char *const text = strcmp(key, "kernel") == 0        ? read->kernel
                     : strcmp(key, "idle") == 0        ? read->idle
                     : strcmp(key, "unsupported") == 0 ? read->unsupported
                     : strcmp(key, "name") == 0        ? read->name
                                                       : NULL;
  if (text) {
    snprintf(text, OCP_EMU_FAULT_BYTES, "%s", value);
    return *value && (text != read->unsupported || visit_members(value, NULL));
  }
  if (strcmp(key, "capability") == 0)
    return read_version(value, &read->cc_major, &read->cc_minor);
  if (strcmp(key, "driver") == 0 && read_version(value, &major, &minor)) {
    read->driver_version = 1000 * major + 10 * minor;
    return true;
  }
  if (strcmp(key, "multiprocessors") == 0 && ocp_parse_number(value, 1024, &number) && number > 0) {
    read->multiprocessors = (int)number;
    return true;
  }
  read->exclusive |= strcmp(key, "exclusive") == 0;
  return strcmp(key, "exclusive") == 0 && strcmp(value, "1") == 0;
}

bool emu_faults_configure(const char *text, char *why, size_t why_bytes) {
  char settings[OCP_EMU_FAULT_BYTES], *next = NULL;
  emu_faults read = {0};
  if (snprintf(settings, sizeof settings, "%s", text) >= (int)sizeof settings) {
    snprintf(why, why_bytes, "%s: got %zu characters, expected at most %d", VARIABLE, strlen(text),
             OCP_EMU_FAULT_BYTES - 1);
    return false;
  }
  for (char *setting = strtok_r(settings, ";", &next); setting; setting = strtok_r(NULL, ";", &next)) {
    char *value = strchr(setting, '=');
    if (value)
      *value++ = 0;
    if (!value || !read_setting(setting, value, &read)) {
      snprintf(why, why_bytes, "%s: got \"%.40s=%.60s\", expected settings such as kernel=PATTERN or capability=7.5",
               VARIABLE, setting, value ? value : "");
      return false;
    }
  }
  pthread_mutex_lock(&table_lock);
  if (attached)
    visit_members(faults.unsupported, restore);
  faults = read;
  if (attached)
    visit_members(faults.unsupported, exchange);
  pthread_mutex_unlock(&table_lock);
  if (*text)
    fprintf(stderr, "%s=\"%s\": the emulated devices have faults on purpose. Unset it to get right results\n", VARIABLE,
            text);
  return true;
}

/* ---- wrong kernels ---- */

bool emu_is_idle(const emu_op *launch) {
  return faults.idle[0] && fnmatch(faults.idle, launch->kernel.function->name, 0) == 0;
}

#define WINDOW ((uint64_t)1 << 20) /* bytes from the address of a parameter on in which a result is looked for */

/* Memory behind a pointer parameter of a launch, and its contents before the launch. */
typedef struct range {
  uint8_t *now, *before;
  uint64_t bytes;
} range;
enum { PROBE_BYTES = 8 };
struct emu_wrong {
  uint32_t count, num_probed;
  bool is_last; /* true: no probe has found an output, and the launch runs once more without a probe */
  range ranges[OCP_EMU_MAX_PARAMS];
};

static void save(emu_wrong *wrong, uint64_t address) {
  uint64_t start = 0, size = 0;
  if (!emu_is_device_address(address) || !emu_heap_find(&emu_device_of(address)->heap, address, 1, &start, &size))
    return;
  const uint64_t bytes = start + size - address;
  for (uint32_t i = 0; i < wrong->count; i++)
    if (wrong->ranges[i].now == (uint8_t *)(address + (uint64_t)emu.alias))
      return; /* saved already: the kernel works in place */
  range *saved = &wrong->ranges[wrong->count];
  *saved = (range){.now = (uint8_t *)(address + (uint64_t)emu.alias), .bytes = bytes < WINDOW ? bytes : WINDOW};
  saved->before = malloc(saved->bytes);
  if (!saved->before)
    return;
  memcpy(saved->before, saved->now, saved->bytes);
  wrong->count++;
}

/* Tensors of one allocation follow each other. A range ends where the next one begins. */
static void end_before_others(const emu_wrong *wrong, range *own) {
  for (uint32_t i = 0; i < wrong->count; i++) {
    const uint8_t *other = wrong->ranges[i].now;
    if (other > own->now && other < own->now + own->bytes)
      own->bytes = (uint64_t)(other - own->now);
  }
}

emu_wrong *emu_wrong_begin(const emu_op *launch) {
  const struct CUfunc_st *function = launch->kernel.function;
  if (!faults.kernel[0] || fnmatch(faults.kernel, function->name, 0) != 0)
    return NULL;
  emu_wrong *wrong = calloc(1, sizeof *wrong);
  for (uint32_t i = 0; wrong && i < launch->num_params; i++)
    if (function->meta->params[i] == OCP_EMU_PARAM_POINTER)
      save(wrong, launch->params[i]);
  for (uint32_t i = 0; wrong && i < wrong->count; i++)
    end_before_others(wrong, &wrong->ranges[i]);
  return wrong;
}

static bool has_value(uint8_t byte) { return byte & 0x7f; }

/* Returns a byte that the launch has changed; NULL: it has changed none. Searches the most significant bytes of 8, of 4
 * and of 2 bytes first: they hold the exponent of a float of that size, so spoil() changes the float by more than a
 * rounding error. `with_value`: skips the bytes that are 0 apart from a sign bit, as in a zero. */
static uint8_t *find_changed_byte(const range *changed, bool with_value) {
  for (uint64_t step = 8; step; step /= 2)
    for (uint64_t at = step - 1; at < changed->bytes; at += step) {
      uint8_t *byte = &changed->now[at];
      if (*byte != changed->before[at] && (has_value(*byte) || !with_value))
        return byte;
    }
  return NULL;
}

static uint8_t *find_changed(const range *changed) {
  uint8_t *byte = find_changed_byte(changed, true);
  return byte ? byte : find_changed_byte(changed, false);
}

static void spoil(uint8_t *byte) {
  if (!has_value(*byte))
    *byte = 0x45; /* 2048 as the last byte of a float32 */
  else
    *byte = *byte == 1 ? 0 : *byte ^ 0x40; /* 1 may be a Boolean; 0x40 is the upper bit of an exponent */
}

/* If an output's memory holds the same result before the launch, the launch changes nothing. Then the launch runs again
 * for one pointer parameter after the other, with one bit inverted in each of the first bytes at its address. If the
 * launch overwrites these bytes, the parameter is an output. */
static void begin_probe(const range *probed) {
  for (uint64_t at = 0; at < PROBE_BYTES && at < probed->bytes; at++)
    probed->now[at] ^= 1;
}

static uint8_t *end_probe(const range *probed) {
  static const uint8_t last_bytes[] = {7, 3, 1, 0};
  uint8_t *found = NULL;
  for (size_t i = 0; i < sizeof last_bytes && !(found && has_value(*found)); i++) {
    const uint64_t at = last_bytes[i];
    if (at < probed->bytes && probed->now[at] != (probed->before[at] ^ 1) && (!found || has_value(probed->now[at])))
      found = &probed->now[at];
  }
  for (uint64_t at = 0; at < PROBE_BYTES && at < probed->bytes; at++)
    if (probed->now[at] == (probed->before[at] ^ 1))
      probed->now[at] ^= 1;
  return found;
}

bool emu_wrong_again(emu_wrong *wrong) {
  if (!wrong)
    return false;
  bool has_spoiled = false;
  for (uint32_t i = 0; i < wrong->count && !wrong->num_probed; i++) {
    uint8_t *changed = find_changed(&wrong->ranges[i]);
    if (changed)
      spoil(changed);
    has_spoiled |= changed != NULL;
  }
  if (wrong->num_probed && !wrong->is_last) {
    uint8_t *written = end_probe(&wrong->ranges[wrong->num_probed - 1]);
    if (written)
      spoil(written);
    has_spoiled = written != NULL;
  }
  if (has_spoiled || wrong->is_last || wrong->count == 0)
    return false;
  wrong->is_last = wrong->num_probed == wrong->count;
  if (!wrong->is_last)
    begin_probe(&wrong->ranges[wrong->num_probed++]);
  return true;
}

void emu_wrong_end(emu_wrong *wrong) {
  for (uint32_t i = 0; wrong && i < wrong->count; i++)
    free(wrong->ranges[i].before);
  free(wrong);
}
