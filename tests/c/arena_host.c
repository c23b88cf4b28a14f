/* An application in C that configures the plugin's arena through ONNX Runtime's environment and through shared
 * allocators, and asks allocators for statistics.
 *
 *   arena_host LIBRARY [bad]    "bad": the environment has a key that does not exist */
#include "base/ort_abi.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct OrtEnvCreationOptions {
  uint32_t version;
  int32_t logging_severity_level;
  const char *log_id;
  void *custom_logging_function, *custom_logging_param;
  const void *threading_options;
  const OrtKeyValuePairs *config_entries;
};

const OrtApiBase *OrtGetApiBase(void);

static const OrtApi *api;

static void check(OrtStatus *status, const char *what) {
  if (!status)
    return;
  fprintf(stderr, "%s: %s\n", what, api->GetErrorMessage(status));
  exit(1);
}
#define CALL(function, ...) check(api->function(__VA_ARGS__), #function)

#define REQUIRE(condition)                                                                                             \
  do {                                                                                                                 \
    if (!(condition)) {                                                                                                \
      fprintf(stderr, "line %d: %s\n", __LINE__, #condition);                                                          \
      exit(2);                                                                                                         \
    }                                                                                                                  \
  } while (0)

static OrtKeyValuePairs *pairs(const char *key, const char *value) {
  OrtKeyValuePairs *made;
  api->CreateKeyValuePairs(&made);
  api->AddKeyValuePair(made, key, value);
  return made;
}

static long long stat_of(const OrtAllocator *allocator, const char *name) {
  OrtKeyValuePairs *stats;
  CALL(AllocatorGetStats, allocator, &stats);
  const char *const *keys, *const *values;
  size_t count;
  long long value = -1;
  api->GetKeyValuePairs(stats, &keys, &values, &count);
  for (size_t i = 0; i < count; i++)
    if (strcmp(keys[i], name) == 0)
      value = atoll(values[i]);
  api->ReleaseKeyValuePairs(stats);
  return value;
}

static OrtEnv *create_env(const char *key) {
  OrtKeyValuePairs *entries = pairs(key, "8000000");
  api->AddKeyValuePair(entries, "ep_factory.CudaPluginExecutionProvider.use_tf32", "0"); /* not an arena key */
  api->AddKeyValuePair(entries, "ep_factory.Other.arena.max_mem", "5");
  struct OrtEnvCreationOptions options = {.version = 24,
                                          .logging_severity_level = ORT_LOGGING_LEVEL_WARNING,
                                          .log_id = "arena_host",
                                          .config_entries = entries};
  OrtEnv *env;
  CALL(CreateEnvWithOptions, &options, &env);
  api->ReleaseKeyValuePairs(entries);
  return env;
}

static OrtAllocator *shared(OrtEnv *env, const OrtEpDevice *device, const char *key, const char *value) {
  OrtKeyValuePairs *options = pairs(key, value);
  OrtAllocator *allocator = NULL;
  CALL(CreateSharedAllocator, env, device, OrtDeviceMemoryType_DEFAULT, OrtDeviceAllocator, options, &allocator);
  api->ReleaseKeyValuePairs(options);
  return allocator;
}

static void test_the_environment_configures_the_arena(OrtEnv *env, const OrtEpDevice *device) {
  const OrtMemoryInfo *info = api->EpDevice_MemoryInfo(device, OrtDeviceMemoryType_DEFAULT);
  OrtAllocator *allocator = NULL;
  CALL(GetSharedAllocator, env, info, &allocator);
  void *tensor = NULL;
  CALL(AllocatorAlloc, allocator, 100000, &tensor);
  REQUIRE(tensor && stat_of(allocator, "Limit") == 8000000 && stat_of(allocator, "InUse") == 100096);
  REQUIRE(stat_of(allocator, "TotalAllocated") == 1 << 20 && stat_of(allocator, "NumArenaExtensions") == 1);
  CALL(AllocatorFree, allocator, tensor);
  OrtStatus *status = api->AllocatorAlloc(allocator, 9000000, &tensor);
  REQUIRE(status || !tensor);
  api->ReleaseStatus(status);
}

/* CreateSharedAllocator replaces the allocator that the registration made, so a new arena begins. */
static void test_shared_allocators_configure_the_arena(OrtEnv *env, const OrtEpDevice *device) {
  OrtAllocator *allocator = shared(env, device, "arena.extend_strategy", "1");
  void *tensor = NULL;
  CALL(AllocatorAlloc, allocator, 5000, &tensor);
  REQUIRE(stat_of(allocator, "Limit") == INT64_MAX && stat_of(allocator, "InUse") == 5120);
  const long long held = stat_of(allocator, "TotalAllocated");
  void *large = NULL;
  CALL(AllocatorAlloc, allocator, 3000000, &large);
  REQUIRE(stat_of(allocator, "TotalAllocated") == held + 3000064);
  CALL(AllocatorFree, allocator, tensor);
  CALL(AllocatorFree, allocator, large);
  REQUIRE(stat_of(allocator, "InUse") == 0);
}

static void test_bad_options_of_a_shared_allocator_are_refused(OrtEnv *env, const OrtEpDevice *device) {
  OrtKeyValuePairs *options = pairs("arena.max_memory", "1");
  OrtAllocator *allocator = NULL;
  OrtStatus *status =
      api->CreateSharedAllocator(env, device, OrtDeviceMemoryType_DEFAULT, OrtDeviceAllocator, options, &allocator);
  REQUIRE(status && strstr(api->GetErrorMessage(status), "arena.max_memory"));
  REQUIRE(strstr(api->GetErrorMessage(status), "known: arena.extend_strategy"));
  api->ReleaseStatus(status);
  api->ReleaseKeyValuePairs(options);
}

static void test_a_mempool_can_be_asked_for(OrtEnv *env, const OrtEpDevice *device) {
  OrtAllocator *allocator = shared(env, device, "arena.use_cuda_mempool", "1");
  void *tensor = NULL;
  CALL(AllocatorAlloc, allocator, 5000, &tensor);
  REQUIRE(stat_of(allocator, "InUse") == 5120 && stat_of(allocator, "TotalAllocated") == 5120);
  REQUIRE(stat_of(allocator, "NumArenaExtensions") >= 0);
  CALL(AllocatorFree, allocator, tensor);
  REQUIRE(stat_of(allocator, "InUse") == 0);
}

static int test_a_bad_key_of_the_environment_fails_the_registration(const char *library) {
  OrtEnv *env = create_env("ep_factory.CudaPluginExecutionProvider.arena.max_memory");
  OrtStatus *status = api->RegisterExecutionProviderLibrary(env, "cuda.virtual", library);
  REQUIRE(status && strstr(api->GetErrorMessage(status), "has no option 'arena.max_memory'"));
  api->ReleaseStatus(status);
  api->ReleaseEnv(env);
  puts("ok");
  return 0;
}

int main(int argc, char **argv) {
  REQUIRE(argc == 2 || argc == 3);
  const uint32_t number = (uint32_t)strtoul(OrtGetApiBase()->GetVersionString() + 2, NULL, 10);
  api = OrtGetApiBase()->GetApi(number < OCP_NEWEST_API ? number : OCP_NEWEST_API);
  if (argc == 3)
    return test_a_bad_key_of_the_environment_fails_the_registration(argv[1]);
  OrtEnv *env = create_env("ep_factory.CudaPluginExecutionProvider.arena.max_mem");
  CALL(RegisterExecutionProviderLibrary, env, "cuda.virtual", argv[1]);
  const OrtEpDevice *const *devices, *device = NULL;
  size_t count;
  CALL(GetEpDevices, env, &devices, &count);
  for (size_t i = 0; i < count; i++)
    if (strcmp(api->EpDevice_EpName(devices[i]), "CudaPluginExecutionProvider") == 0)
      device = devices[i];
  REQUIRE(device);
  test_the_environment_configures_the_arena(env, device);
  test_shared_allocators_configure_the_arena(env, device);
  test_a_mempool_can_be_asked_for(env, device);
  test_bad_options_of_a_shared_allocator_are_refused(env, device);
  CALL(UnregisterExecutionProviderLibrary, env, "cuda.virtual");
  api->ReleaseEnv(env);
  puts("ok");
  return 0;
}
