/* An application in C, linked only to libonnxruntime. It registers the plugin, selects the emulated device, runs a
 * model with one Add of eight floats, and unregisters. Checks that repeated Runs do not leak host memory, that
 * sessions, allocators and values which outlive the registration can be released, and that the Python that the plugin
 * starts replaces no signal's action. Exits with 0.
 *
 * host LIBRARY MODEL */
#define _GNU_SOURCE
#include "base/ort_abi.h"

#include <malloc.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EP_NAME "CudaPluginExecutionProvider"

const OrtApiBase *OrtGetApiBase(void);

static const OrtApi *api;

static void check(OrtStatus *status, const char *what) {
  if (!status)
    return;
  fprintf(stderr, "%s: %s\n", what, api->GetErrorMessage(status));
  exit(1);
}
#define CALL(function, ...) check(api->function(__VA_ARGS__), #function)

static void require(int condition, const char *what) {
  if (condition)
    return;
  fprintf(stderr, "%s\n", what);
  exit(2);
}

enum { NUM_SIGNALS = 65 };
typedef void (*signal_handler)(int);

static void read_handlers(signal_handler handlers[NUM_SIGNALS]) {
  for (int i = 1; i < NUM_SIGNALS; i++) {
    struct sigaction action;
    handlers[i] = sigaction(i, NULL, &action) == 0 ? action.sa_handler : SIG_DFL;
  }
}

static void require_handlers(const signal_handler expected[NUM_SIGNALS]) {
  signal_handler handlers[NUM_SIGNALS];
  read_handlers(handlers);
  for (int i = 1; i < NUM_SIGNALS; i++) {
    if (handlers[i] != expected[i])
      fprintf(stderr, "signal %d\n", i);
    require(handlers[i] == expected[i], "a signal's action was replaced");
  }
}

static const OrtEpDevice *find_device(OrtEnv *env) {
  const OrtEpDevice *const *devices;
  size_t count;
  CALL(GetEpDevices, env, &devices, &count);
  for (size_t i = 0; i < count; i++)
    if (strcmp(api->EpDevice_EpName(devices[i]), EP_NAME) == 0)
      return devices[i];
  require(0, "the plugin offers no device");
  return NULL;
}

static void require_placement(const OrtSession *session) {
  const OrtEpAssignedSubgraph *const *parts;
  size_t count;
  CALL(Session_GetEpGraphAssignmentInfo, session, &parts, &count);
  require(count == 1, "one subgraph expected");
  const char *name;
  CALL(EpAssignedSubgraph_GetEpName, parts[0], &name);
  require(strcmp(name, EP_NAME) == 0, "the node does not run on the plugin");
}

static void run(OrtSession *session, const OrtRunOptions *options) {
  float a[8], b[8];
  for (int i = 0; i < 8; i++) {
    a[i] = (float)i;
    b[i] = 10.0f * (float)i;
  }
  const int64_t shape[] = {8};
  OrtMemoryInfo *memory;
  CALL(CreateCpuMemoryInfo, OrtDeviceAllocator, OrtMemTypeDefault, &memory);
  OrtValue *inputs[2], *output = NULL;
  CALL(CreateTensorWithDataAsOrtValue, memory, a, sizeof a, shape, 1, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, &inputs[0]);
  CALL(CreateTensorWithDataAsOrtValue, memory, b, sizeof b, shape, 1, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, &inputs[1]);
  const char *input_names[] = {"a", "b"}, *output_names[] = {"c"};
  CALL(Run, session, options, input_names, (const OrtValue *const *)inputs, 2, output_names, 1, &output);
  float *result;
  CALL(GetTensorMutableData, output, (void **)&result);
  for (int i = 0; i < 8; i++)
    require(result[i] == 11.0f * (float)i, "wrong result");
  api->ReleaseValue(output);
  api->ReleaseValue(inputs[0]);
  api->ReleaseValue(inputs[1]);
  api->ReleaseMemoryInfo(memory);
}

/* Runs on a stream that the application creates and passes in the Run options. */
static void run_on_stream(OrtSession *session, const OrtEpDevice *device) {
  OrtSyncStream *stream;
  CALL(CreateSyncStreamForEpDevice, device, NULL, &stream);
  OrtRunOptions *options;
  CALL(CreateRunOptions, &options);
  api->RunOptionsSetSyncStream(options, stream);
  run(session, options);
  api->ReleaseRunOptions(options);
  api->ReleaseSyncStream(stream);
}

/* Checks that 500 Runs keep no host memory. With a sanitizer, whose malloc is not glibc's, it checks nothing. */
static void run_steadily(OrtSession *session) {
  for (int i = 0; i < 50; i++)
    run(session, NULL);
  const size_t before = mallinfo2().uordblks;
  for (int i = 0; i < 500; i++)
    run(session, NULL);
  const size_t after = mallinfo2().uordblks;
  if (after > before + 1000)
    fprintf(stderr, "500 Runs kept %zu bytes\n", after - before);
  require(after <= before + 1000, "steady Runs keep host memory");
}

static OrtSession *create_session(OrtEnv *env, const OrtEpDevice *device, const char *model) {
  OrtSessionOptions *options;
  CALL(CreateSessionOptions, &options);
  CALL(AddSessionConfigEntry, options, "session.record_ep_graph_assignment_info", "1");
  CALL(SessionOptionsAppendExecutionProvider_V2, options, env, &device, 1, NULL, NULL, 0);
  OrtSession *session;
  CALL(CreateSession, env, model, options, &session);
  require_placement(session);
  api->ReleaseSessionOptions(options);
  return session;
}

/* Makes three Runs; the second one has its own profile. */
static void run_profiled(OrtEnv *env, const OrtEpDevice *device, const char *model, const char *folder) {
  char of_run[500];
  snprintf(of_run, sizeof of_run, "%s/run", folder);
  OrtSession *session = create_session(env, device, model);
  OrtRunOptions *options;
  CALL(CreateRunOptions, &options);
  CALL(RunOptionsEnableProfiling, options, of_run);
  run(session, NULL);
  run(session, options);
  run(session, NULL);
  api->ReleaseRunOptions(options);
  api->ReleaseSession(session);
}

static void use_shared_allocator(OrtEnv *env, const OrtEpDevice *device) {
  OrtAllocator *allocator;
  void *memory;
  CALL(CreateSharedAllocator, env, device, OrtDeviceMemoryType_DEFAULT, OrtDeviceAllocator, NULL, &allocator);
  CALL(AllocatorAlloc, allocator, 1000, &memory);
  CALL(AllocatorFree, allocator, memory);
  CALL(ReleaseSharedAllocator, env, device, OrtDeviceMemoryType_DEFAULT);
}

/* The session, its allocator and one of its values outlive the registration; the session still runs. */
static void outlive_registration(OrtEnv *env, const char *library, const char *model, int session_first) {
  CALL(RegisterExecutionProviderLibrary, env, "cuda.virtual", library);
  const OrtEpDevice *device = find_device(env);
  use_shared_allocator(env, device);
  OrtSession *session = create_session(env, device, model);
  OrtAllocator *allocator;
  CALL(CreateAllocator, session, api->EpDevice_MemoryInfo(device, OrtDeviceMemoryType_DEFAULT), &allocator);
  const int64_t shape[] = {8};
  OrtValue *value;
  CALL(CreateTensorAsOrtValue, allocator, shape, 1, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, &value);
  CALL(UnregisterExecutionProviderLibrary, env, "cuda.virtual");
  run(session, NULL);
  if (session_first)
    api->ReleaseSession(session);
  api->ReleaseValue(value);
  api->ReleaseAllocator(allocator);
  if (!session_first)
    api->ReleaseSession(session);
}

int main(int argc, char **argv) {
  require(argc == 3 || argc == 4, "usage: host LIBRARY MODEL [FOLDER-OF-PROFILES]");
  const char *version = OrtGetApiBase()->GetVersionString();
  uint32_t number = (uint32_t)strtoul(version + 2, NULL, 10);
  api = OrtGetApiBase()->GetApi(number < OCP_NEWEST_API ? number : OCP_NEWEST_API);
  require(api != NULL, "no API");

  signal_handler handlers[NUM_SIGNALS];
  signal(SIGINT, SIG_DFL); /* Python would replace only the default action, and this process may ignore SIGINT */
  read_handlers(handlers);
  OrtEnv *env;
  CALL(CreateEnv, ORT_LOGGING_LEVEL_WARNING, "host", &env);
  for (int round = 0; round < 2; round++) { /* in the second round Python is running already */
    CALL(RegisterExecutionProviderLibrary, env, "cuda.virtual", argv[1]);
    const OrtEpDevice *device = find_device(env);
    OrtSession *session = create_session(env, device, argv[2]);
    require_handlers(handlers);
    run_steadily(session);
    run_on_stream(session, device);
    if (argc > 3 && round == 0)
      run_profiled(env, device, argv[2], argv[3]);
    api->ReleaseSession(session);
    CALL(UnregisterExecutionProviderLibrary, env, "cuda.virtual");
  }
  outlive_registration(env, argv[1], argv[2], 0);
  outlive_registration(env, argv[1], argv[2], 1);
  api->ReleaseEnv(env);
  puts("ok");
  return 0;
}
