/* Fuzzes plans: loading a damaged plan fails, or running it stays within its memory. For builds with sanitizers.
 *
 * Arguments: IMAGE PLAN SEED ROUNDS. PLAN has the inputs x, float [2, 3], and a host input int64 [2] with the values 3
 * and 2; it uses kernel 0 of IMAGE, "idle", and weight 0 of 64 bytes. Prints how many damaged plans were refused, did
 * not match, failed, and ran. */
#include <string.h>

#include "base/error.h"
#include "check.h"
#include "device/device.h"
#include "device/memory/memory.h"
#include "device/memory/weights.h"
#include "device/open/devices.h"
#include "device/stream.h"
#include "driver/driver.h"
#include "emulator/calls/emulator.h"
#include "plan/format.h"
#include "python/host.h"
#include "run/cluster.h"
#include "run/executor.h"
#include "run/instance/input.h"

enum { MAX_BYTES = 1 << 20, DEVICE_BYTES = 32 << 20 };

typedef struct file {
  _Alignas(64) unsigned char data[MAX_BYTES];
  size_t bytes;
} file;

static void read_file(const char *path, file *out) {
  FILE *stream = fopen(path, "rb");
  CHECK(stream);
  out->bytes = fread(out->data, 1, MAX_BYTES, stream);
  CHECK(out->bytes > 0 && out->bytes < MAX_BYTES);
  fclose(stream);
}

static uint64_t random_state;
static uint64_t next_random(uint64_t limit) {
  random_state = random_state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return (random_state >> 33) % limit;
}

/* Returns a boundary value, or a random one. */
static uint32_t damage(uint32_t old) {
  static const uint32_t likely[] = {0,  1,   2,       3,       4,          15,         16,
                                    17, 255, 1 << 16, 1 << 20, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF};
  switch (next_random(4)) {
  case 0:
    return old + 1;
  case 1:
    return old - 1;
  case 2:
    return old ^ (1u << next_random(32));
  default:
    return likely[next_random(sizeof likely / sizeof *likely)];
  }
}

static void damage_plan(unsigned char *blob, size_t *bytes) {
  if (next_random(50) == 0)
    *bytes = next_random(*bytes);
  for (uint64_t i = 0, count = 1 + next_random(3); i < count && *bytes >= 4; i++) {
    /* At least a quarter of the changes hit the header, since wrong counts are the most dangerous. */
    const size_t words = next_random(4) == 0 && *bytes > 80 ? 20 : *bytes / 4;
    unsigned char *at = blob + 4 * next_random(words);
    uint32_t word;
    memcpy(&word, at, sizeof word);
    word = damage(word);
    memcpy(at, &word, sizeof word);
  }
}

/* Wraps the emulator's launch function and limits the grid: the kernel does nothing, but a damaged grid could take
 * years. */
static const ocp_driver *emulator;
static CUresult launch_few_blocks(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                  unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                                  CUstream stream, void **params, void **extra) {
  return emulator->LaunchKernel(function, grid_x < 4 ? grid_x : 4, grid_y < 4 ? grid_y : 4, grid_z < 4 ? grid_z : 4,
                                block_x, block_y, block_z, shared_bytes, stream, params, extra);
}

typedef struct outputs {
  ocp_device *device;
  CUdeviceptr addresses[64];
  uint32_t count;
} outputs;

static int allocate(void *context, uint32_t index, const int64_t *dims, uint32_t rank, void **data, ocp_error *error) {
  outputs *out = context;
  (void)index;
  uint64_t bytes = 16; /* bytes of the largest element */
  for (uint32_t d = 0; d < rank; d++) {
    CHECK(dims[d] >= 0);
    if (__builtin_mul_overflow(bytes, (uint64_t)dims[d], &bytes) || bytes > DEVICE_BYTES)
      return ocp_fail(error, ORT_FAIL, "too large");
  }
  CHECK(out->count < 64);
  CUdeviceptr address;
  if (ocp_device_alloc(out->device, bytes, NULL, &address, error) != ORT_OK)
    return error->code;
  out->addresses[out->count++] = address;
  *data = (void *)(uintptr_t)address;
  return ORT_OK;
}

typedef struct counts {
  int refused, unmatched, failed, ran;
} counts;

static void try_plan(ocp_device *device, ocp_stream *stream, const ocp_kernel_ref *kernel, const unsigned char *blob,
                     size_t bytes, const ocp_input *inputs, counts *n) {
  ocp_error error = {0};
  ocp_weight *weight;
  const char contents[64] = {1};
  const uint32_t host_input = 1;
  ocp_cluster *cluster = ocp_cluster_create(device, "fuzz", ocp_python_build_variant, 0);
  CHECK(cluster);
  CHECK_OK(ocp_cluster_add_kernels(cluster, kernel, 1, error));
  CHECK_OK(ocp_weight_acquire(device, OCP_WEIGHT_ON_DEVICE, contents, sizeof contents, &weight, error));
  CHECK_OK(ocp_cluster_add_weights(cluster, &weight, 1, error));
  CHECK_OK(ocp_cluster_set_host_inputs(cluster, &host_input, 1, error));
  if (ocp_cluster_add_plan(cluster, blob, bytes, &error) != ORT_OK) {
    CHECK(error.text[0]);
    n->refused++;
  } else {
    outputs out = {.device = device};
    if (ocp_cluster_run(cluster, stream, inputs, 2, allocate, &out, &error) == ORT_OK)
      n->ran++;
    else if (strstr(error.text, "Python"))
      n->unmatched++;
    else
      n->failed++;
    if (device->lost)
      fprintf(stderr, "%s\n", error.text);
    CHECK(device->lost == 0);
    CHECK_OK(ocp_stream_synchronize(stream, error));
    for (uint32_t i = 0; i < out.count; i++)
      ocp_device_free(device, out.addresses[i], NULL);
  }
  ocp_cluster_release(cluster);
}

int main(int argc, char **argv) {
  static file image, plan, damaged;
  CHECK(argc == 5);
  read_file(argv[1], &image);
  read_file(argv[2], &plan);
  random_state = strtoull(argv[3], NULL, 10);
  char text[200];
  ocp_emu_config config;
  ocp_emu_get_config(&config);
  config.device_bytes = DEVICE_BYTES;
  CHECK(ocp_emu_configure(&config, text, sizeof text) == 0);

  ocp_error error = {0};
  ocp_device *device = ocp_device_open(true, 0, &error);
  CHECK(device);
  emulator = device->driver;
  ocp_driver driver = *emulator;
  driver.LaunchKernel = launch_few_blocks;
  device->driver = &driver;
  ocp_stream *stream;
  CHECK_OK(!ocp_device_enter(device, error).entered);
  CHECK_OK(ocp_stream_create(device, &stream, error));
  CUmodule module;
  const uint8_t idle_params[] = {OCP_PARAM_POINTER, OCP_PARAM_I64};
  ocp_kernel_ref kernel = {.name = "idle", .num_params = 2, .params = idle_params};
  CHECK(device->driver->ModuleLoadData(&module, image.data, image.bytes) == CUDA_SUCCESS);
  CHECK(device->driver->ModuleGetFunction(&kernel.function, module, "idle") == CUDA_SUCCESS);
  CUdeviceptr x, shape;
  const int64_t shape_values[2] = {3, 2}, x_dims[2] = {2, 3}, shape_dims[1] = {2};
  CHECK_OK(ocp_device_alloc(device, 24, NULL, &x, error));
  CHECK_OK(ocp_device_alloc(device, 16, NULL, &shape, error));
  CHECK(device->driver->MemsetD8Async(x, 0, 24, NULL) == CUDA_SUCCESS);
  CHECK(device->driver->MemcpyHtoDAsync(shape, shape_values, 16, NULL) == CUDA_SUCCESS);
  CHECK(device->driver->CtxSynchronize() == CUDA_SUCCESS);
  const ocp_input inputs[2] = {
      {.data = (void *)(uintptr_t)x, .dims = x_dims, .rank = 2, .dtype = 1, .on_device = true},
      {.data = (void *)(uintptr_t)shape, .dims = shape_dims, .rank = 1, .dtype = 7, .on_device = true}};

  counts whole = {0}, n = {0};
  try_plan(device, stream, &kernel, plan.data, plan.bytes, inputs, &whole);
  CHECK(whole.ran == 1);
  for (long i = strtol(argv[4], NULL, 10); i > 0; i--) {
    damaged.bytes = plan.bytes;
    memcpy(damaged.data, plan.data, plan.bytes);
    damage_plan(damaged.data, &damaged.bytes);
    /* An exact copy on the heap, so that a sanitizer sees reads beyond its end. */
    unsigned char *blob = malloc(damaged.bytes + 1);
    CHECK(blob);
    memcpy(blob, damaged.data, damaged.bytes);
    try_plan(device, stream, &kernel, blob, damaged.bytes, inputs, &n);
    free(blob);
  }
  printf("refused %d unmatched %d failed %d ran %d\n", n.refused, n.unmatched, n.failed, n.ran);
  ocp_device_free(device, x, NULL);
  ocp_device_free(device, shape, NULL);
  ocp_stream_release(stream);
  device->driver = emulator;
  CHECK(emulator->ModuleUnload(module) == CUDA_SUCCESS);
  return 0;
}
