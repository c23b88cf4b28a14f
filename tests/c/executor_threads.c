/* Runs one cluster on several threads, with few and changing shapes, while plans are added to it and weights are
 * precomputed. For builds with sanitizers.
 *
 * Arguments: IMAGE PLAN ONCE ROUNDS. PLAN computes 2 * x + 1 for float x of shape [n, m] by kernel 0 of IMAGE,
 * "affine". ONCE computes the same for weight 0, which has MAX_ELEMENTS floats. */
#include <pthread.h>

#include "base/error.h"
#include "check.h"
#include "device/device.h"
#include "device/memory/memory.h"
#include "device/memory/weights.h"
#include "device/open/devices.h"
#include "device/stream.h"
#include "driver/driver.h"
#include "plan/format.h"
#include "python/host.h"
#include "run/cluster.h"
#include "run/executor.h"
#include "run/instance/input.h"
#include "run/precompute.h"

enum { MAX_BYTES = 1 << 20, NUM_THREADS = 4, MAX_ELEMENTS = 15, NUM_PLANS = 30 };

static ocp_device *device;
static ocp_cluster *cluster;
static _Alignas(64) unsigned char once[MAX_BYTES];
static size_t once_bytes;
static ocp_kernel_ref kernel;
static long rounds;

static size_t read_file(const char *path, unsigned char *data) {
  FILE *stream = fopen(path, "rb");
  CHECK(stream);
  size_t bytes = fread(data, 1, MAX_BYTES, stream);
  CHECK(bytes > 0 && bytes < MAX_BYTES);
  fclose(stream);
  return bytes;
}

typedef struct output {
  CUdeviceptr address;
  int64_t elements;
} output;

static int give_output(void *context, uint32_t index, const int64_t *dims, uint32_t rank, void **data,
                       ocp_error *error) {
  output *out = context;
  (void)error;
  CHECK(index == 0 && rank == 2);
  out->elements = dims[0] * dims[1];
  *data = (void *)(uintptr_t)out->address;
  return ORT_OK;
}

/* Precomputes a weight, on a stream that the library borrows, and reads it on `stream`. */
static void compute_weight(ocp_stream *stream, const float *x) {
  float y[MAX_ELEMENTS];
  ocp_weight *source, *result;
  ocp_cluster *own = ocp_cluster_create(device, "once", ocp_python_build_variant, 0);
  CHECK(own);
  CHECK_OK(ocp_weight_acquire(device, OCP_WEIGHT_ON_DEVICE, x, sizeof y, &source, error));
  CHECK_OK(ocp_weight_create_state(device, NULL, sizeof y, &result, error));
  CHECK_OK(ocp_cluster_add_kernels(own, &kernel, 1, error));
  CHECK(ocp_cluster_add_weights(own, &source, 1, &(ocp_error){0}) == 0);
  CHECK_OK(ocp_cluster_add_plan(own, once, once_bytes, error));
  CHECK_OK(ocp_cluster_precompute(own, &result, 1, error));
  CHECK(device->driver->MemcpyDtoHAsync(y, ocp_weight_address(result), sizeof y, stream->handle) == CUDA_SUCCESS);
  CHECK_OK(ocp_stream_synchronize(stream, error));
  for (int i = 0; i < MAX_ELEMENTS; i++)
    CHECK(y[i] == 2 * x[i] + 1);
  ocp_cluster_release(own);
  ocp_weight_release(result);
}

static void *run_shapes(void *argument) {
  const int seed = *(const int *)argument;
  float x[MAX_ELEMENTS], y[MAX_ELEMENTS];
  CUdeviceptr input;
  output out;
  ocp_stream *stream;
  CHECK_OK(!ocp_device_enter(device, error).entered);
  CHECK_OK(ocp_stream_create(device, &stream, error));
  CHECK_OK(ocp_device_alloc(device, sizeof x, NULL, &input, error));
  CHECK_OK(ocp_device_alloc(device, sizeof y, NULL, &out.address, error));
  for (int i = 0; i < MAX_ELEMENTS; i++)
    x[i] = (float)(seed * 100 + i);
  CHECK(device->driver->MemcpyHtoDAsync(input, x, sizeof x, stream->handle) == CUDA_SUCCESS);
  for (long round = 0; round < rounds; round++) {
    if (round % 10 == 0)
      compute_weight(stream, x);
    const int64_t dims[2] = {1 + (round * 7 + seed) % 5, 1 + round % 3};
    const ocp_input in = {.data = (void *)(uintptr_t)input, .dims = dims, .rank = 2, .dtype = 1, .on_device = true};
    CHECK_OK(ocp_cluster_run(cluster, stream, &in, 1, give_output, &out, error));
    CHECK(out.elements == dims[0] * dims[1]);
    CHECK(device->driver->MemcpyDtoHAsync(y, out.address, (size_t)out.elements * sizeof *y, stream->handle) ==
          CUDA_SUCCESS);
    CHECK_OK(ocp_stream_synchronize(stream, error));
    for (int i = 0; i < out.elements; i++)
      CHECK(y[i] == 2 * x[i] + 1);
  }
  ocp_device_free(device, input, stream);
  ocp_device_free(device, out.address, stream);
  ocp_stream_release(stream);
  return NULL;
}

int main(int argc, char **argv) {
  static _Alignas(64) unsigned char image[MAX_BYTES], plan[MAX_BYTES];
  static const uint8_t params[] = {OCP_PARAM_POINTER, OCP_PARAM_POINTER, OCP_PARAM_I64, OCP_PARAM_F32, OCP_PARAM_F32};
  CHECK(argc == 5);
  const size_t image_bytes = read_file(argv[1], image), plan_bytes = read_file(argv[2], plan);
  once_bytes = read_file(argv[3], once);
  rounds = strtol(argv[4], NULL, 10);
  ocp_error error = {0};
  device = ocp_device_open(true, 0, &error);
  CHECK(device);
  CHECK_OK(!ocp_device_enter(device, error).entered);
  CUmodule module;
  kernel = (ocp_kernel_ref){.name = "affine", .num_params = 5, .params = params};
  CHECK(device->driver->ModuleLoadData(&module, image, image_bytes) == CUDA_SUCCESS);
  CHECK(device->driver->ModuleGetFunction(&kernel.function, module, kernel.name) == CUDA_SUCCESS);
  cluster = ocp_cluster_create(device, "threads", ocp_python_build_variant, 0);
  CHECK(cluster);
  CHECK_OK(ocp_cluster_add_kernels(cluster, &kernel, 1, error));
  CHECK_OK(ocp_cluster_add_plan(cluster, plan, plan_bytes, error));
  pthread_t threads[NUM_THREADS];
  int seeds[NUM_THREADS];
  for (int i = 0; i < NUM_THREADS; i++) {
    seeds[i] = i;
    CHECK(pthread_create(&threads[i], NULL, run_shapes, &seeds[i]) == 0);
  }
  for (int i = 0; i < NUM_PLANS; i++)
    CHECK_OK(ocp_cluster_add_plan(cluster, plan, plan_bytes, error));
  for (int i = 0; i < NUM_THREADS; i++)
    CHECK(pthread_join(threads[i], NULL) == 0);
  ocp_cluster_release(cluster);
  CHECK(device->driver->ModuleUnload(module) == CUDA_SUCCESS);
  puts("executor_threads passed");
  return 0;
}
