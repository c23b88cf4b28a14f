#include "ort/data/allocator.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/host.h"
#include "base/process.h"
#include "device/arena_options.h"
#include "device/device.h"
#include "device/memory/memory.h"
#include "device/open/arena_settings.h"
#include "device/open/devices.h"
#include "ort/data/place.h"

/* ---- OrtMemoryInfo ---- */

int ocp_ort_memory_info(bool emulated, int ordinal, int kind, const OrtMemoryInfo **out, ocp_error *error) {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  static OrtMemoryInfo *infos[2][OCP_NUM_INFOS][OCP_MAX_DEVICES];
  *out = NULL;
  if (kind < 0 || kind >= OCP_NUM_INFOS)
    return ocp_fail(error, ORT_INVALID_ARGUMENT,
                    "memory type: got %d, expected %d (device), %d (pinned) or %d (initializers)", kind,
                    OCP_INFO_DEVICE, OCP_INFO_PINNED, OCP_INFO_READ_ONLY);
  const int code = ocp_device_check_ordinal(ordinal, error);
  if (code)
    return code;
  static const char *const names[2][OCP_NUM_INFOS] = {{"Cuda", "CudaPinned", "CudaReadOnly"},
                                                      {"CudaEmulated", "CudaEmulatedPinned", "CudaEmulatedReadOnly"}};
  OrtStatus *status = NULL;
  pthread_mutex_lock(&lock);
  OrtMemoryInfo **info = &infos[emulated][kind][ordinal];
  if (!*info)
    status = ocp_api->CreateMemoryInfo_V2(
        names[emulated][kind], OrtMemoryInfoDeviceType_GPU, ocp_vendor_id(emulated), ordinal,
        kind == OCP_INFO_PINNED ? OrtDeviceMemoryType_HOST_ACCESSIBLE : OrtDeviceMemoryType_DEFAULT, /*alignment=*/0,
        kind == OCP_INFO_READ_ONLY ? OrtReadOnlyAllocator : OrtDeviceAllocator, info);
  *out = *info;
  pthread_mutex_unlock(&lock);
  return status ? ocp_fail_status(error, status) : ORT_OK;
}

/* ---- OrtAllocator ---- */

/* An OrtAllocator for one kind of memory of one device. Each CreateAllocator call makes one. Its first allocation opens
 * the device, so that registering the library does not create a CUDA context on every GPU. */
typedef struct ort_allocator {
  OrtAllocator ort;
  const OrtMemoryInfo *info;
  bool emulated;
  int ordinal, memory;
  _Atomic(ocp_device *) device;
} ort_allocator;

/* The error of the calling thread's latest failed allocation. OrtAllocator::Alloc can only return NULL, so the error is
 * logged and kept here. The plugin's next call that gets a tensor without memory reports it. */
static pthread_key_t failure_key; /* an ocp_error: too large for a thread-local variable, see emulator/blocks/fiber.h */
static bool has_failure_key;

static void make_failure_key(void) { has_failure_key = pthread_key_create(&failure_key, free) == 0; }

/* Returns the error of the calling thread's latest failed allocation; NULL: none has failed. With `make`, returns an
 * empty error instead; NULL then means out of memory. */
static ocp_error *last_failure(bool make) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, make_failure_key);
  ocp_error *failure = has_failure_key ? pthread_getspecific(failure_key) : NULL;
  if (failure || !make || !has_failure_key)
    return failure;
  failure = calloc(1, sizeof *failure);
  if (failure && pthread_setspecific(failure_key, failure) == 0)
    return failure;
  free(failure);
  return NULL;
}

const char *ocp_ort_why_no_memory(void) {
  const ocp_error *failure = last_failure(/*make=*/false);
  return failure ? failure->text : "an allocation failed earlier, and ONNX Runtime's log says why";
}

/* The stream that will use the memory that the calling thread allocates; NULL: any stream may use it. */
static _Thread_local ocp_stream *allocating_on;

void ocp_ort_allocating_on(ocp_stream *stream) { allocating_on = stream; }

static ocp_device *open_device(ort_allocator *allocator, ocp_error *error) {
  ocp_device *device = atomic_load_explicit(&allocator->device, memory_order_acquire);
  if (!device) {
    device = ocp_device_open(allocator->emulated, allocator->ordinal, error);
    atomic_store_explicit(&allocator->device, device, memory_order_release);
  }
  return device;
}

static void *give(uint64_t address, const ocp_error *error) {
  if (!address) {
    ocp_error *failure = last_failure(/*make=*/true);
    if (failure)
      *failure = *error;
    ocp_log(ORT_LOGGING_LEVEL_ERROR, error->text, "Alloc");
  }
  return (void *)(uintptr_t)address;
}

static void *allocator_alloc(OrtAllocator *this_, size_t size) {
  ort_allocator *allocator = (ort_allocator *)(void *)this_;
  ocp_error error;
  uint64_t address = 0;
  ocp_device *device = open_device(allocator, &error);
  ocp_stream *stream = allocating_on && allocating_on->device == device ? allocating_on : NULL;
  if (device)
    ocp_pool_alloc(device, allocator->memory, size, stream, &address, &error);
  return give(address, &error);
}

static void *allocator_reserve(OrtAllocator *this_, size_t size) {
  ort_allocator *allocator = (ort_allocator *)(void *)this_;
  ocp_error error;
  uint64_t address = 0;
  ocp_device *device = open_device(allocator, &error);
  if (device)
    ocp_pool_reserve(device, allocator->memory, size, &address, &error);
  return give(address, &error);
}

static void allocator_free(OrtAllocator *this_, void *address) {
  ort_allocator *allocator = (ort_allocator *)(void *)this_;
  /* ORT may free memory through another OrtAllocator for the same memory, so this one may not have opened the device
   * yet. */
  ocp_error ignored;
  ocp_device *device = open_device(allocator, &ignored);
  /* Frees without a stream: ORT frees a tensor once its last user is enqueued, and does not tell on which streams. */
  if (!device || ocp_pool_free(device, allocator->memory, (uint64_t)(uintptr_t)address, NULL))
    return;
  char text[256];
  snprintf(text, sizeof text,
           "cannot free %p: the allocator of %s memory of device %d did not allocate it, or it was freed already. Free "
           "each value once, with the allocator that made it",
           address, allocator->memory == OCP_PINNED_MEMORY ? "pinned" : "device", allocator->ordinal);
  ocp_log(ORT_LOGGING_LEVEL_ERROR, text, "Free");
}

static const OrtMemoryInfo *allocator_info(const OrtAllocator *this_) {
  return ((const ort_allocator *)(const void *)this_)->info;
}

static OrtStatus *allocator_get_stats(const OrtAllocator *this_, OrtKeyValuePairs **out) {
  const ort_allocator *allocator = (const ort_allocator *)(const void *)this_;
  ocp_memory_stats stats = {.limit = INT64_MAX};
  *out = NULL;
  if (atomic_load(&ocp_forked)) /* locks of other threads stay locked in a forked child */
    return ocp_api->CreateStatus(ORT_RUNTIME_EXCEPTION, OCP_FORKED_TEXT);
  ocp_device *device = ocp_device_find(allocator->emulated, allocator->ordinal);
  if (device)
    ocp_pool_stats(device, allocator->memory, &stats);
  const struct {
    const char *key;
    int64_t value;
  } entries[] = {
      {"Limit", stats.limit},
      {"InUse", stats.in_use},
      {"TotalAllocated", stats.total},
      {"MaxInUse", stats.max_in_use},
      {"NumAllocs", stats.num_allocs},
      {"NumReserves", stats.num_reserves},
      {"NumArenaExtensions", stats.num_extensions},
      {"NumArenaShrinkages", stats.num_shrinkages},
      {"MaxAllocSize", stats.max_alloc_size},
  };
  ocp_api->CreateKeyValuePairs(out);
  for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
    char text[24];
    snprintf(text, sizeof text, "%lld", (long long)entries[i].value);
    ocp_api->AddKeyValuePair(*out, entries[i].key, text);
  }
  return NULL;
}

static OrtStatus *allocator_shrink(OrtAllocator *this_) {
  const ort_allocator *allocator = (const ort_allocator *)(const void *)this_;
  ocp_device *device = ocp_device_find(allocator->emulated, allocator->ordinal);
  ocp_error error = {0};
  if (device && ocp_device_check(device, &error) == ORT_OK)
    ocp_pool_shrink(device, allocator->memory, true);
  return ocp_status(&error);
}

/* ---- options ---- */

/* Passes the options whose keys begin with `prefix` to the arena, without the prefix. Unless the prefix is "", skips
 * the options whose keys do not continue with "arena.". */
static int configure(const ort_allocator *allocator, const OrtKeyValuePairs *options, const char *prefix,
                     ocp_error *error) {
  enum { MAX_OPTIONS = 64 };
  const char *const *keys = NULL, *const *values = NULL;
  const char *ours[MAX_OPTIONS], *our_values[MAX_OPTIONS];
  size_t count = 0, num_ours = 0;
  const size_t prefix_bytes = strlen(prefix);
  ocp_api->GetKeyValuePairs(options, &keys, &values, &count);
  for (size_t i = 0; i < count && num_ours < MAX_OPTIONS; i++) {
    if (strncmp(keys[i], prefix, prefix_bytes) != 0)
      continue;
    if (prefix_bytes && strncmp(keys[i] + prefix_bytes, "arena.", 6) != 0)
      continue; /* not an arena's option but one of the provider */
    ours[num_ours] = keys[i] + prefix_bytes;
    our_values[num_ours++] = values[i];
  }
  char warning[OCP_ARENA_WARNING_BYTES];
  if (ocp_arena_configure(allocator->emulated, allocator->ordinal, allocator->memory, ours, our_values, num_ours,
                          warning, error) == ORT_OK &&
      *warning)
    ocp_log(ORT_LOGGING_LEVEL_WARNING, warning, "CreateAllocator");
  return error->code;
}

/* Applies `options`. If it is NULL, applies the entries "ep_factory.<name>.arena..." of ORT's environment, which ORT
 * does not pass to CreateAllocator. */
static int use_options(const ort_allocator *allocator, const OrtEpFactory *factory, const OrtKeyValuePairs *options,
                       ocp_error *error) {
  char prefix[64];
  if (options)
    return configure(allocator, options, "", error);
  snprintf(prefix, sizeof prefix, "ep_factory.%s.", factory->GetName(factory));
  OrtKeyValuePairs *environment = NULL;
  OrtStatus *status = ocp_ep_api->GetEnvConfigEntries(&environment);
  if (status)
    return ocp_fail_status(error, status);
  const int code = configure(allocator, environment, prefix, error);
  ocp_api->ReleaseKeyValuePairs(environment);
  return code;
}

/* ---- the factory's slots ---- */

static int fill(ort_allocator *allocator, const OrtMemoryInfo *memory_info, ocp_error *error) {
  const ocp_place where = ocp_ort_place(ocp_ep_api->MemoryInfo_GetMemoryDevice(memory_info));
  if (where.kind != OCP_PLACE_DEVICE && where.kind != OCP_PLACE_PINNED)
    return ocp_fail(error, ORT_INVALID_ARGUMENT,
                    OCP_EP_NAME " has no allocator for %s, expected device memory or pinned memory",
                    where.kind == OCP_PLACE_HOST ? "pageable host memory" : "memory of another device, vendor or type");
  OrtAllocatorType type = OrtDeviceAllocator;
  OrtStatus *status = ocp_api->MemoryInfoGetType(memory_info, &type);
  if (status)
    return ocp_fail_status(error, status);
  const bool pinned = where.kind == OCP_PLACE_PINNED, read_only = type == OrtReadOnlyAllocator;
  allocator->emulated = where.emulated;
  allocator->ordinal = where.ordinal;
  allocator->memory = pinned ? OCP_PINNED_MEMORY : OCP_DEVICE_MEMORY;
  allocator->ort = (OrtAllocator){
      .version = ocp_api_version,
      .Alloc = read_only ? allocator_reserve : allocator_alloc,
      .Free = allocator_free,
      .Info = allocator_info,
      .Reserve = allocator_reserve,
      .GetStats = allocator_get_stats,
      /* AllocOnStream stays NULL, because ONNX Runtime reports its failure as "Allocation failed." without a reason.
       * When Alloc returns NULL, ONNX Runtime makes the tensor all the same, and the plugin's first call that uses
       * the tensor reports the reason. ocp_ort_allocating_on passes the stream. */
      .Shrink = read_only ? NULL : allocator_shrink,
  };
  const int kind = pinned ? OCP_INFO_PINNED : read_only ? OCP_INFO_READ_ONLY : OCP_INFO_DEVICE;
  return ocp_ort_memory_info(where.emulated, where.ordinal, kind, &allocator->info, error);
}

OrtStatus *ocp_ort_create_allocator(OrtEpFactory *factory, const OrtMemoryInfo *memory_info,
                                    const OrtKeyValuePairs *options, OrtAllocator **out) {
  *out = NULL;
  ocp_error error = {0};
  ort_allocator *allocator = calloc(1, sizeof *allocator);
  if (!allocator)
    return ocp_api->CreateStatus(ORT_FAIL, OCP_OUT_OF_HOST_MEMORY);
  if (fill(allocator, memory_info, &error) != ORT_OK || use_options(allocator, factory, options, &error) != ORT_OK) {
    free(allocator);
    return ocp_status(&error);
  }
  ocp_arena_retain(allocator->emulated, allocator->ordinal, allocator->memory);
  *out = &allocator->ort;
  return NULL;
}

void ocp_ort_release_allocator(OrtEpFactory *factory, OrtAllocator *released) {
  (void)factory;
  ort_allocator *allocator = (ort_allocator *)(void *)released;
  if (!allocator)
    return;
  /* While the library is registered, ORT holds one allocator for each memory. So nothing uses the arena after its last
   * allocator was released. */
  if (ocp_arena_release(allocator->emulated, allocator->ordinal, allocator->memory)) {
    ocp_device *device = ocp_device_find(allocator->emulated, allocator->ordinal);
    if (device)
      ocp_device_trim(device);
  }
  free(allocator);
}
