/* Sessions of the mock host: compiled clusters that run on several threads. */
#include <pthread.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/error.h"
#include "base/host.h"
#include "check.h"
#include "device/arena_options.h"
#include "device/device.h"
#include "device/memory/memory.h"
#include "device/open/arena_settings.h"
#include "driver/driver.h"
#include "mock_host.h"
#include "ort/kernels/compute.h"
#include "plan/format.h"
#include "python/host.h"
#include "run/cluster.h"

/* Builds the plan of out = block_sum(a + b), for vectors of equal dynamic length, in blocks of 64 elements. */
static size_t make_plan(uint8_t *out, size_t capacity) {
  struct {
    ocp_plan_header header;
    ocp_plan_input inputs[2];
    ocp_plan_output outputs[1];
    uint32_t kernels[2];
    uint32_t dims[2]; /* one entry, padded to 8 bytes */
    ocp_plan_expr exprs[5];
    uint32_t guards[2];
    ocp_plan_record records[2];
    ocp_plan_param params[6];
    ocp_plan_segment segments[1];
    ocp_plan_node nodes[2];
    uint32_t record_nodes[2];
    char strings[16];
  } plan = {
      .header = {.magic = OCP_PLAN_MAGIC,
                 .version = OCP_PLAN_VERSION,
                 .num_registers = 7,
                 .num_inputs = 2,
                 .num_outputs = 1,
                 .num_kernels = 2,
                 .num_dims = 1,
                 .num_exprs = 5,
                 .num_guards = 1,
                 .num_records = 2,
                 .num_params = 6,
                 .num_segments = 1,
                 .num_nodes = 2,
                 .strings_bytes = 16,
                 .num_record_nodes = 2},
      .inputs = {{FLOAT, 1, 0, OCP_NO_REG, 0, 0}, {FLOAT, 1, 1, OCP_NO_REG, 0, 0}},
      .outputs = {{FLOAT, 1, 0, 0, OCP_NO_NODE, 0}},
      .kernels = {0, 1},
      .dims = {0},
      .exprs = {{OCP_EXPR_EQ, 2, 0, 1, 0, 0, 0, OCP_NO_NODE, 0},
                {OCP_EXPR_CONST, 3, 0, 0, 0, 0, 64, OCP_NO_NODE, 0},
                {OCP_EXPR_CEILDIV, 4, 0, 3, 0, 0, 0, OCP_NO_NODE, 0},
                {OCP_EXPR_CONST, 5, 0, 0, 0, 0, 1, OCP_NO_NODE, 0},
                {OCP_EXPR_CONST, 6, 0, 0, 0, 0, 4, OCP_NO_NODE, 0}},
      .guards = {2},
      .records = {{OCP_RECORD_LAUNCH, 0, 0, 0, 0, 4, {4, 5, 5}, {64, 1, 1}, OCP_NO_REG, OCP_NO_REG, 0, 1},
                  {OCP_RECORD_LAUNCH, 1, 1, 0, 4, 2, {4, 5, 5}, {64, 1, 1}, OCP_NO_REG, OCP_NO_REG, 1, 1}},
      .params = {{OCP_PARAM_POINTER, OCP_REF_INPUT, 0, OCP_NO_REG, 0},
                 {OCP_PARAM_POINTER, OCP_REF_INPUT, 1, OCP_NO_REG, 0},
                 {OCP_PARAM_POINTER, OCP_REF_OUTPUT, 0, OCP_NO_REG, 0},
                 {OCP_PARAM_I64, 0, 0, 0, 0},
                 {OCP_PARAM_POINTER, OCP_REF_OUTPUT, 0, OCP_NO_REG, 0},
                 {OCP_PARAM_I64, 0, 0, 0, 0}},
      .segments = {{0, 2}},
      .nodes = {{0, 0}, {4, 4}},
      .record_nodes = {0, 1},
      .strings = "add\0block_sum",
  };
  CHECK(sizeof plan <= capacity);
  memcpy(out, &plan, sizeof plan);
  return sizeof plan;
}

static ocp_cluster *make_cluster(const void *image, size_t bytes, CUmodule *module) {
  static const uint8_t add_params[] = {OCP_PARAM_POINTER, OCP_PARAM_POINTER, OCP_PARAM_POINTER, OCP_PARAM_I64};
  ocp_kernel_ref kernels[2] = {{.name = "add", .num_params = 4, .params = add_params},
                               {.name = "block_sum", .num_params = 2, .params = add_params + 2}};
  const ocp_driver *driver = device->driver;
  ocp_error entering;
  OCP_STAY stay = ocp_device_enter(device, &entering);
  CHECK(stay.entered);
  CHECK(driver->ModuleLoadData(module, image, bytes) == CUDA_SUCCESS);
  for (int i = 0; i < 2; i++)
    CHECK(driver->ModuleGetFunction(&kernels[i].function, *module, kernels[i].name) == CUDA_SUCCESS);
  ocp_cluster *cluster = ocp_cluster_create(device, "mock cluster", ocp_python_build_variant, 1);
  CHECK(cluster);
  ocp_error error = {0};
  CHECK(ocp_cluster_add_kernels(cluster, kernels, 2, &error) == 0);
  ocp_cluster_set_graphs(cluster, 1, 4);
  uint8_t plan[4096];
  size_t size = make_plan(plan, sizeof plan);
  CHECK_OK(ocp_cluster_add_plan(cluster, plan, size, error));
  for (size_t cut = 0; cut < size; cut += 4)
    CHECK(ocp_cluster_add_plan(cluster, plan, cut, &error) != 0);
  return cluster;
}

typedef struct session {
  OrtNodeComputeInfo *info;
  void *state;
  unsigned seed;
  int runs;
  CUcontext host_context; /* a context that each Run must leave current; NULL: none */
} session;

static void run_once(const session *s, OrtSyncStream *stream, unsigned *seed) {
  int64_t n = rand_r(seed) % 2 ? rand_r(seed) % 1000 : 64 * (rand_r(seed) % 4); /* so that some shapes repeat */
  float *host = malloc(2 * (size_t)n * sizeof *host + 1);
  OrtValue back = mock_tensor(pinned_allocator, pinned_memory, FLOAT, 1, &n);
  for (int64_t i = 0; i < 2 * n; i++)
    host[i] = (float)(rand_r(seed) % 100);
  OrtValue host_a = mock_wrap(host, mock_cpu, FLOAT, 1, &n), b = mock_wrap(host + n, mock_cpu, FLOAT, 1, &n);
  OrtValue a = mock_tensor(device_allocator, device_memory, FLOAT, 1, &n);
  copy(&host_a, &a, stream);
  OrtKernelContext context = {.num_inputs = 2,
                              .num_outputs = 1,
                              .inputs = {&a, &b},
                              .allocator = device_allocator,
                              .output_device = device_memory,
                              .stream = stream};
  check_ok(s->info->Compute(s->info, s->state, &context));
  if (stream)
    copy(&context.outputs[0], &back, stream);
  mock_free(&a); /* like ORT, which frees a tensor once its last user is enqueued */
  if (stream)
    finish_run(stream);
  else
    copy(&context.outputs[0], &back, NULL);
  for (int64_t first = 0; first < n; first += 64) {
    int64_t end = first + 64 < n ? first + 64 : n;
    float sum = 0;
    for (int64_t i = first; i < end; i++)
      sum += host[i] + host[n + i];
    for (int64_t i = first; i < end; i++)
      CHECK(((float *)back.data)[i] == sum);
  }
  mock_free(&context.outputs[0]);
  mock_free(&back);
  free(host);
}

static void *run_many(void *argument) {
  session *s = argument;
  unsigned seed = s->seed;
  be_elsewhere(s->host_context);
  OrtSyncStream stream = make_stream();
  for (int run = 0; run < s->runs; run++) {
    run_once(s, run % 8 == 7 ? NULL : &stream, &seed);
    if (run % 16 == 5) /* like the run option memory.enable_memory_arena_shrinkage */
      check_ok(device_allocator->Shrink(device_allocator));
  }
  stream.impl->Release(stream.impl);
  check_elsewhere();
  return NULL;
}

static atomic_bool done;

/* Repeats calls that an application may make at any time: statistics, trim, shrink, limits and reservations. */
static void *look_at_memory_and_trim(void *unused) {
  be_elsewhere(host_context);
  while (!atomic_load(&done)) {
    OrtKeyValuePairs *stats = NULL;
    check_ok(device_allocator->GetStats(device_allocator, &stats));
    ocp_api->ReleaseKeyValuePairs(stats);
    ocp_device_trim(device);
    check_ok(pinned_allocator->Shrink(pinned_allocator));
    ocp_error error = {0};
    CHECK(ocp_arena_set_limit(1, 0, OCP_DEVICE_MEMORY, 32 << 20, &error) == ORT_OK);
    device_allocator->Free(device_allocator, device_allocator->Reserve(device_allocator, 5000));
    CHECK(ocp_arena_set_limit(1, 0, OCP_DEVICE_MEMORY, 0, &error) == ORT_OK);
    check_elsewhere();
  }
  return unused;
}

static void test_sessions_run_on_several_threads(session sessions[2]) {
  pthread_t threads[4], looking;
  atomic_store(&done, false);
  CHECK(pthread_create(&looking, NULL, look_at_memory_and_trim, NULL) == 0);
  session per_thread[4];
  for (int i = 0; i < 4; i++) {
    per_thread[i] = sessions[i % 2];
    per_thread[i].seed = (unsigned)i + 1;
    per_thread[i].host_context = i % 2 ? host_context : NULL;
    CHECK(pthread_create(&threads[i], NULL, run_many, &per_thread[i]) == 0);
  }
  for (int i = 0; i < 4; i++)
    pthread_join(threads[i], NULL);
  atomic_store(&done, true);
  pthread_join(looking, NULL);
}

static void test_hostile_values_fail_with_a_reason(const session *s) {
  const int64_t eight[] = {8, 1}, nine[] = {9};
  float host[9] = {0};
  OrtSyncStream stream = make_stream();
  OrtValue a = mock_wrap(host, mock_cpu, FLOAT, 1, eight), b = mock_wrap(host, mock_cpu, FLOAT, 1, nine);
  OrtValue matrix = mock_wrap(host, mock_cpu, FLOAT, 2, eight);
  OrtValue other = mock_wrap(host, other_device_memory, FLOAT, 1, eight);
  OrtKernelContext context = {.num_inputs = 2,
                              .num_outputs = 1,
                              .inputs = {&a, &b},
                              .allocator = device_allocator,
                              .output_device = device_memory,
                              .stream = &stream};
  check_fails(s->info->Compute(s->info, s->state, &context), "Python"); /* no plan matches; no Python builds one */
  context.inputs[1] = &matrix;
  check_fails(s->info->Compute(s->info, s->state, &context), "Python");
  context.inputs[1] = &other;
  check_fails(s->info->Compute(s->info, s->state, &context), "input 'y' is in the memory of another device");
  context.inputs[1] = NULL;
  check_fails(s->info->Compute(s->info, s->state, &context), "input 'y' is missing");
  context.num_inputs = 1;
  check_fails(s->info->Compute(s->info, s->state, &context), "out of range");
  context.num_inputs = 2;
  context.inputs[1] = &a;
  context.refuse_outputs = true;
  check_fails(s->info->Compute(s->info, s->state, &context), "no memory for the output");
  context.refuse_outputs = false;
  check_ok(s->info->Compute(s->info, s->state, &context)); /* the session still works after these failures */
  finish_run(&stream);
  mock_free(&context.outputs[0]);
  stream.impl->Release(stream.impl);
}

static void test_a_forked_child_gets_a_clear_error(const session *s) {
  const int64_t eight = 8;
  float host[8] = {0};
  OrtValue a = mock_wrap(host, mock_cpu, FLOAT, 1, &eight);
  OrtSyncStream stream = make_stream();
  void *address = device_allocator->Alloc(device_allocator, 64);
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    OrtKernelContext context = {.num_inputs = 2,
                                .num_outputs = 1,
                                .inputs = {&a, &a},
                                .allocator = device_allocator,
                                .output_device = device_memory,
                                .stream = &stream};
    check_fails(s->info->Compute(s->info, s->state, &context), "forked");
    CHECK(!device_allocator->Alloc(device_allocator, 64));
    device_allocator->Free(device_allocator, address);
    OrtValue *dst = &a;
    const OrtValue *src = &context.outputs[0];
    context.outputs[0] = mock_wrap(address, device_memory, FLOAT, 1, &eight);
    check_fails(transfer->CopyTensors(transfer, &src, &dst, NULL, 1), "forked");
    check_fails(stream.impl->OnSessionRunEnd(stream.impl), "forked");
    OrtKeyValuePairs *stats = NULL;
    check_fails(device_allocator->GetStats(device_allocator, &stats), "forked");
    check_fails(device_allocator->Shrink(device_allocator), "forked");
    ocp_device_trim(device);
    stream.impl->Release(stream.impl);
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  device_allocator->Free(device_allocator, address);
  stream.impl->Release(stream.impl);
}

void test_sessions(const void *image, size_t bytes, int runs) {
  static const char *const names[] = {"x", "y"};
  session sessions[2];
  ocp_cluster *clusters[2];
  CUmodule modules[2];
  for (int i = 0; i < 2; i++) {
    ocp_error error = {0};
    clusters[i] = make_cluster(image, bytes, &modules[i]);
    sessions[i] =
        (session){.info = ocp_compute_info_create(clusters[i], device, names, NULL, 2, 0, &error), .runs = runs};
    CHECK(sessions[i].info);
    check_ok(sessions[i].info->CreateState(sessions[i].info, NULL, &sessions[i].state));
  }
  test_sessions_run_on_several_threads(sessions);
  test_hostile_values_fail_with_a_reason(&sessions[0]);
  test_a_forked_child_gets_a_clear_error(&sessions[0]);
  for (int i = 0; i < 2; i++) {
    sessions[i].info->ReleaseState(sessions[i].info, sessions[i].state);
    ocp_compute_info_release(sessions[i].info);
    ocp_cluster_release(clusters[i]);
    check_elsewhere();
    OCP_STAY stay = ocp_device_enter_to_release(device);
    CHECK(stay.entered && device->driver->ModuleUnload(modules[i]) == CUDA_SUCCESS);
  }
}
