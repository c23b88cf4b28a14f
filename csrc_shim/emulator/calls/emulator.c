/* Configuration and lifetime of the emulated devices: environment, address space, fork. */
#define _GNU_SOURCE /* CPU_COUNT */
#include "emulator/calls/emulator.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/number.h"
#include "emulator/fault.h"
#include "emulator/host/cpu.h"
#include "emulator/shadow.h"
#include "emulator/state.h"
#include "emulator/work/queue.h"

#define ENVIRONMENT "ORT_CUDA_PLUGIN_EMULATE"
#define DEFAULT_DEVICE_BYTES ((uint64_t)16 << 30)
#define PINNED_BYTES ((uint64_t)16 << 30)
#define MAX_WORKERS 1024u
#define MAX_DEVICE_BYTES ((uint64_t)512 << 30)

static pthread_mutex_t start_lock = PTHREAD_MUTEX_INITIALIZER;
static bool configured;
static char environment_error[200];

/* ---- configuration ---- */

static bool read_number(const char *name, uint64_t least, uint64_t largest, uint64_t *value) {
  const char *text = getenv(name);
  if (!text || !*text)
    return true;
  if (ocp_parse_number(text, largest, value) && *value >= least)
    return true;
  snprintf(environment_error, sizeof environment_error, "%s=\"%.60s\" is not a number from %llu to %llu", name, text,
           (unsigned long long)least, (unsigned long long)largest);
  return false;
}

static bool read_flag(const char *name, bool *value) {
  const char *text = getenv(name);
  if (!text || !*text)
    return true;
  const int flag = ocp_parse_flag(text);
  *value = flag > 0;
  if (flag < 0)
    snprintf(environment_error, sizeof environment_error, "%s=\"%.60s\" is not " OCP_FLAG_TAKES, name, text);
  return flag >= 0;
}

/* Reads the configuration from the environment, unless ocp_emu_configure was called before. If a value is invalid, Init
 * fails. */
static void configure_from_environment(void) {
  if (configured)
    return;
  configured = true;
  uint64_t devices = 1, workers = 0, bytes = DEFAULT_DEVICE_BYTES, seed = 0, seconds = 0;
  bool check = false;
  const char *streams = getenv(ENVIRONMENT "_STREAMS");
  bool adversarial = streams && strcmp(streams, "adversarial") == 0;
  if (streams && *streams && !adversarial && strcmp(streams, "inline") != 0)
    snprintf(environment_error, sizeof environment_error, "%s_STREAMS=\"%.60s\" is neither inline nor adversarial",
             ENVIRONMENT, streams);
  (void)(read_number(ENVIRONMENT "_DEVICES", 1, EMU_MAX_DEVICES, &devices) &&
         read_number(ENVIRONMENT "_WORKERS", 0, MAX_WORKERS, &workers) &&
         read_number(ENVIRONMENT "_MEMORY", EMU_PAGE, MAX_DEVICE_BYTES, &bytes) &&
         read_number(ENVIRONMENT "_SEED", 0, UINT64_MAX, &seed) && read_flag(ENVIRONMENT "_CHECK", &check) &&
         read_number(EMU_SEMAPHORE_VARIABLE, 1, 86400, &seconds));
  emu.config = (ocp_emu_config){
      .num_devices = (uint32_t)devices,
      .workers = (uint32_t)workers,
      .device_bytes = bytes,
      .adversarial = adversarial,
      .check = check,
      .semaphore_seconds = (uint32_t)seconds,
      .seed = seed,
  };
  const char *faults = getenv(ENVIRONMENT "_FAULTS");
  if (!environment_error[0] && faults && emu_faults_configure(faults, environment_error, sizeof environment_error))
    snprintf(emu.config.faults, sizeof emu.config.faults, "%s", faults);
}

static int refuse(char *text, size_t text_bytes, const char *reason) {
  if (text && text_bytes)
    snprintf(text, text_bytes, "%s", reason);
  return CUDA_ERROR_INVALID_VALUE;
}

static uint32_t count_threads(void) {
  if (emu.config.workers)
    return emu.config.workers;
  cpu_set_t cpus;
  if (sched_getaffinity(0, sizeof cpus, &cpus))
    return 1;
  int count = CPU_COUNT(&cpus);
  return count > 0 ? (uint32_t)count : 1;
}

/* Sets the red zone of each device's heap: in the checking mode at least EMU_GRANULE bytes after each allocation stay
 * unallocated. The heap of pinned memory has no red zone. */
static void set_redzones(void) {
  for (uint32_t index = 0; index < emu.config.num_devices && atomic_load(&emu.started); index++)
    emu.devices[index].heap.redzone = emu.config.check ? EMU_GRANULE : 0;
}

static void stop(void);

int ocp_emu_configure(const ocp_emu_config *config, char *text, size_t text_bytes) {
  if (config->num_devices < 1 || config->num_devices > EMU_MAX_DEVICES)
    return refuse(text, text_bytes, "the number of emulated devices must be 1 to 8");
  if (config->device_bytes < EMU_PAGE || config->device_bytes > MAX_DEVICE_BYTES || config->device_bytes % EMU_PAGE)
    return refuse(text, text_bytes, "the memory of an emulated device must be 4 KiB to 512 GiB, in whole pages");
  if (config->workers > MAX_WORKERS)
    return refuse(text, text_bytes, "the number of worker threads of the emulated devices must be at most 1024");
  pthread_mutex_lock(&start_lock);
  int result = CUDA_SUCCESS;
  if (strcmp(config->faults, emu.config.faults) != 0 && !emu_faults_configure(config->faults, text, text_bytes)) {
    pthread_mutex_unlock(&start_lock);
    return CUDA_ERROR_INVALID_VALUE;
  }
  bool resize = config->num_devices != emu.config.num_devices || config->device_bytes != emu.config.device_bytes;
  if (!configured || !atomic_load(&emu.started)) {
    emu.config = *config;
  } else if (resize && atomic_load(&emu.live) > 0) {
    result = refuse(text, text_bytes,
                    "the number and memory of emulated devices cannot change while memory, streams, events, modules or "
                    "graphs of the devices exist. Release these first");
  } else {
    emu_queue_run_all();
    if (resize && !emu_queue_is_empty()) {
      pthread_mutex_unlock(&start_lock);
      return refuse(text, text_bytes,
                    "the number and memory of emulated devices cannot change while work waits for an external "
                    "semaphore. Signal the semaphore first");
    }
    if (resize)
      stop();
    else if (emu.config.check && !config->check)
      emu_shadow_stop();
    bool begins = config->check && !emu.config.check && !resize;
    emu.config = *config;
    emu.threads = count_threads();
    emu_queue_seed(config->seed);
    set_redzones();
    if (begins && emu_shadow_start()) {
      emu.config.check = 0;
      result = refuse(text, text_bytes, "no address space for the tables of the checking mode");
    }
  }
  configured = result == CUDA_SUCCESS || configured;
  pthread_mutex_unlock(&start_lock);
  return result;
}

void ocp_emu_get_config(ocp_emu_config *config) {
  pthread_mutex_lock(&start_lock);
  configure_from_environment();
  *config = emu.config;
  pthread_mutex_unlock(&start_lock);
}

/* ---- lifetime ---- */

static void after_fork_in_child(void) { atomic_store(&emu.forked, true); }

static void *reserve(uint64_t bytes, int protection) {
  void *range = mmap(NULL, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return range == MAP_FAILED ? NULL : range;
}

static void stop(void) {
  if (!atomic_load(&emu.started))
    return;
  atomic_store(&emu.started, false);
  emu_shadow_stop();
  for (uint32_t index = 0; index < emu.config.num_devices; index++) {
    emu_heap_destroy(&emu.devices[index].heap);
    pthread_mutex_destroy(&emu.devices[index].legacy.lock);
  }
  munmap((void *)emu.pinned.base, emu.pinned.bytes);
  emu_heap_destroy(&emu.pinned);
  munmap((void *)emu.base, emu.bytes);
  munmap((void *)(emu.base + (uint64_t)emu.alias), emu.bytes);
}

static CUresult start_locked(void) {
  static bool fork_handler;
  configure_from_environment();
  if (environment_error[0])
    return emu_fail(CUDA_ERROR_INVALID_VALUE, "%s", environment_error);
  if (!fork_handler) {
    pthread_atfork(NULL, NULL, after_fork_in_child);
    fork_handler = true;
  }
  emu.threads = count_threads();
  uint64_t each = emu.config.device_bytes = (emu.config.device_bytes + EMU_PAGE - 1) & ~(uint64_t)(EMU_PAGE - 1);
  emu_queue_seed(emu.config.seed);
  emu.span = each <= MAX_DEVICE_BYTES / 2 ? 2 * each : each;
  emu.bytes = emu.span * emu.config.num_devices;
  void *addresses = reserve(emu.bytes, PROT_NONE);
  void *contents = reserve(emu.bytes, PROT_READ | PROT_WRITE);
  void *pinned = reserve(PINNED_BYTES, PROT_READ | PROT_WRITE);
  uint32_t redzone = emu.config.check ? EMU_GRANULE : 0;
  uint32_t ready = 0;
  if (addresses && contents && pinned &&
      !emu_heap_init(&emu.pinned, (uint64_t)pinned, 0, PINNED_BYTES, PINNED_BYTES, 0)) {
    emu.base = (uint64_t)addresses;
    emu.alias = (char *)contents - (char *)addresses;
    for (; ready < emu.config.num_devices; ready++) {
      emu_device *device = &emu.devices[ready];
      if (emu_heap_init(&device->heap, emu.base + ready * emu.span, emu.alias, emu.span, each, redzone))
        break;
      device->ordinal = (int)ready;
      atomic_store(&device->retained, 0);
      atomic_store(&device->error, 0);
      device->legacy = (struct CUstream_st){.device = device};
      pthread_mutex_init(&device->legacy.lock, NULL);
    }
  }
  if (ready == emu.config.num_devices && (!emu.config.check || !emu_shadow_start())) {
    atomic_store(&emu.started, true);
    return CUDA_SUCCESS;
  }
  while (ready > 0)
    emu_heap_destroy(&emu.devices[--ready].heap);
  if (emu.pinned.tables)
    emu_heap_destroy(&emu.pinned);
  if (addresses)
    munmap(addresses, emu.bytes);
  if (contents)
    munmap(contents, emu.bytes);
  if (pinned)
    munmap(pinned, PINNED_BYTES);
  return emu_fail(
      CUDA_ERROR_OUT_OF_MEMORY,
      "the system does not give %llu bytes of address space for emulated devices: up to 4 times " ENVIRONMENT
      "_MEMORY for each device, and 16 GiB. Raise `ulimit -v`, or set the variable to less",
      (unsigned long long)(2 * emu.bytes + PINNED_BYTES));
}

CUresult emu_start(void) {
  if (atomic_load_explicit(&emu.forked, memory_order_relaxed))
    return emu_fail(CUDA_ERROR_NOT_INITIALIZED, "the emulated device cannot be used in a forked child process");
  if (atomic_load_explicit(&emu.started, memory_order_acquire))
    return CUDA_SUCCESS;
  pthread_mutex_lock(&start_lock);
  CUresult result = atomic_load(&emu.started) ? CUDA_SUCCESS : start_locked();
  pthread_mutex_unlock(&start_lock);
  return result;
}

void *ocp_emu_host_pointer(uint64_t address, size_t bytes) {
  if (!atomic_load(&emu.started) || !emu_is_device_address(address) ||
      !emu_heap_find(&emu_device_of(address)->heap, address, bytes, NULL, NULL))
    return NULL;
  if (emu.config.check)
    emu_shadow_written(address, bytes); /* the checking mode cannot see what the caller writes */
  return (void *)(address + (uint64_t)emu.alias);
}

int ocp_emu_owns(uint64_t address) { return atomic_load(&emu.started) && emu_is_device_address(address); }
