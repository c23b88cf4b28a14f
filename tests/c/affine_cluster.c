#include "affine_cluster.h"

#include <string.h>

#include "base/counters.h"
#include "base/error.h"
#include "device/device.h"
#include "device/memory/memory.h"
#include "device/open/devices.h"
#include "device/order.h"
#include "device/stream.h"
#include "driver/driver.h"
#include "emulator/calls/emulator.h"
#include "plan/format.h"
#include "python/host.h"
#include "run/cluster.h"
#include "run/instance/input.h"

enum { MAX_BYTES = 1 << 20 };

ocp_device *device;
ocp_cluster *cluster;
const ocp_driver *real;
static CUmodule module;

/* ---- setup ---- */

static size_t read_file(const char *path, unsigned char *data) {
  FILE *stream = fopen(path, "rb");
  CHECK(stream);
  size_t bytes = fread(data, 1, MAX_BYTES, stream);
  CHECK(bytes > 0 && bytes < MAX_BYTES);
  fclose(stream);
  return bytes;
}

void make_affine_cluster(char **arguments) {
  static _Alignas(64) unsigned char image[MAX_BYTES], plan[MAX_BYTES];
  static const uint8_t params[] = {OCP_PARAM_POINTER, OCP_PARAM_POINTER, OCP_PARAM_I64, OCP_PARAM_F32, OCP_PARAM_F32};
  const size_t image_bytes = read_file(arguments[0], image), plan_bytes = read_file(arguments[1], plan);
  ocp_emu_config config;
  char text[200];
  ocp_emu_get_config(&config);
  config.adversarial = strcmp(arguments[2], "adversarial") == 0;
  config.seed = strtoull(arguments[3], NULL, 10);
  CHECK(ocp_emu_configure(&config, text, sizeof text) == 0);
  ocp_error error = {0};
  device = ocp_device_open(true, 0, &error);
  CHECK(device);
  CHECK_OK(!ocp_device_enter(device, error).entered);
  ocp_kernel_ref kernel = {.name = "affine", .num_params = 5, .params = params};
  real = device->driver;
  CHECK(real->ModuleLoadData(&module, image, image_bytes) == CUDA_SUCCESS);
  CHECK(real->ModuleGetFunction(&kernel.function, module, kernel.name) == CUDA_SUCCESS);
  cluster = ocp_cluster_create(device, "affine", ocp_python_build_variant, 0);
  CHECK(cluster);
  CHECK_OK(ocp_cluster_add_kernels(cluster, &kernel, 1, error));
  CHECK_OK(ocp_cluster_add_plan(cluster, plan, plan_bytes, error));
}

void release_affine_cluster(void) {
  ocp_cluster_release(cluster);
  CHECK(atomic_load(&ocp_counters[OCP_GRAPHS_LIVE]) == 0);
  CHECK(atomic_load(&ocp_counters[OCP_DEVICE_BYTES_IN_USE]) == 0);
  CHECK(real->ModuleUnload(module) == CUDA_SUCCESS);
}

/* ---- Runs ---- */

static int give_output(void *context, uint32_t index, const int64_t *dims, uint32_t rank, void **data,
                       ocp_error *error) {
  (void)index, (void)dims, (void)rank, (void)error;
  *data = (void *)(uintptr_t)((place *)context)->output;
  return ORT_OK;
}

place make_place(void) {
  place made_here;
  CHECK_OK(ocp_device_alloc(device, MAX_ELEMENTS * sizeof(float), NULL, &made_here.input, error));
  CHECK_OK(ocp_device_alloc(device, MAX_ELEMENTS * sizeof(float), NULL, &made_here.output, error));
  return made_here;
}

void free_place(const place *where) {
  ocp_device_free(device, where->input, NULL);
  ocp_device_free(device, where->output, NULL);
}

void upload(ocp_stream *stream, const place *where, float first) {
  float x[MAX_ELEMENTS];
  for (int i = 0; i < MAX_ELEMENTS; i++)
    x[i] = first + (float)i;
  CHECK_OK(!ocp_device_enter(device, error).entered);
  CHECK(real->MemcpyHtoDAsync(where->input, x, sizeof x, stream->handle) == CUDA_SUCCESS);
  ocp_stream_enqueued(stream);
}

void run(ocp_stream *stream, place *where, int64_t rows) {
  const int64_t dims[2] = {rows, 3};
  const ocp_input in = {
      .data = (void *)(uintptr_t)where->input, .dims = dims, .rank = 2, .dtype = 1, .on_device = true};
  CHECK_OK(ocp_cluster_run(cluster, stream, &in, 1, give_output, where, error));
}

void check_result(ocp_stream *stream, const place *where, int64_t rows, float first) {
  float y[MAX_ELEMENTS];
  CHECK(real->MemcpyDtoHAsync(y, where->output, (size_t)rows * 3 * sizeof *y, stream->handle) == CUDA_SUCCESS);
  CHECK_OK(ocp_stream_synchronize(stream, error));
  for (int i = 0; i < rows * 3; i++)
    CHECK(y[i] == 2 * (first + (float)i) + 1);
}
