/* Runs the same library calls, with new sizes in each round, on several threads. Before the calls of a round, each of
 * these threads has the library code prepare the algorithms, on several threads at once. For builds with sanitizers.
 *
 * Arguments: LIBCUDNN ROUNDS. LIBCUDNN: the stand-in fake_cudnn.c. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>

#include "base/error.h"
#include "check.h"
#include "device/device.h"
#include "device/memory/memory.h"
#include "device/open/devices.h"
#include "device/stream.h"
#include "driver/driver.h"
#include "emulator/calls/emulator.h"
#include "vendor/problem.h"

enum { NUM_THREADS = 3, NUM_CALLS = 6, NUM_POINTERS = 4, NUM_VALUES = 20, MAX_ELEMENTS = 64, WORKSPACE = 1 << 20 };

static ocp_device *device;
static ocp_problem *problems[NUM_CALLS];
static long rounds;

/* Sets the values of a convolution of x [1, 1, 4, width], all ones, with a 1x1 filter of 2: the result is all twos. */
static void set_values(int64_t values[NUM_VALUES], int64_t width) {
  const int64_t first[5] = {1, 1, 1, 1, 4 * width}, sizes[2] = {4, width};
  for (int i = 0; i < 5; i++)
    values[i] = first[i];
  for (int i = 0; i < 2; i++) {
    const int64_t of[7] = {sizes[i], 1, sizes[i], 1, 1, 0, 0};
    for (int k = 0; k < 7; k++)
      values[5 + 7 * i + k] = of[k];
  }
  values[19] = WORKSPACE;
}

static void *run_calls(void *argument) {
  (void)argument;
  float ones[MAX_ELEMENTS], results[MAX_ELEMENTS];
  CUdeviceptr memory[NUM_POINTERS]; /* out, x, w, workspace */
  const size_t bytes[NUM_POINTERS] = {sizeof ones, sizeof ones, sizeof(float), WORKSPACE};
  ocp_stream *stream;
  CHECK_OK(!ocp_device_enter(device, error).entered);
  CHECK_OK(ocp_stream_create(device, &stream, error));
  for (int i = 0; i < NUM_POINTERS; i++)
    CHECK_OK(ocp_device_alloc(device, bytes[i], NULL, &memory[i], error));
  for (int i = 0; i < MAX_ELEMENTS; i++)
    ones[i] = 1;
  CHECK(device->driver->MemcpyHtoDAsync(memory[1], ones, sizeof ones, stream->handle) == CUDA_SUCCESS);
  CHECK(device->driver->MemcpyHtoDAsync(memory[2], &(float){2}, sizeof(float), stream->handle) == CUDA_SUCCESS);
  void *pointers[NUM_POINTERS];
  for (int i = 0; i < NUM_POINTERS; i++)
    pointers[i] = (void *)(uintptr_t)memory[i];
  for (long round = 0; round < rounds; round++) {
    const int64_t width = 1 + round % (MAX_ELEMENTS / 4);
    int64_t values[NUM_VALUES];
    set_values(values, width);
    ocp_library_call calls[NUM_CALLS];
    for (int i = 0; i < NUM_CALLS; i++)
      calls[i] = (ocp_library_call){problems[i], pointers, NUM_POINTERS, NUM_VALUES, values};
    ocp_library_prepare(calls, NUM_CALLS, stream);
    for (int i = 0; i < NUM_CALLS; i++)
      CHECK_OK(ocp_library_run(problems[i], stream, pointers, NUM_POINTERS, values, NUM_VALUES, error));
    CHECK(device->driver->MemcpyDtoHAsync(results, memory[0], sizeof results, stream->handle) == CUDA_SUCCESS);
    CHECK_OK(ocp_stream_synchronize(stream, error));
    for (int64_t i = 0; i < 4 * width; i++)
      CHECK(results[i] == 2);
  }
  for (int i = 0; i < NUM_POINTERS; i++)
    ocp_device_free(device, memory[i], stream);
  ocp_stream_release(stream);
  return NULL;
}

int main(int argc, char **argv) {
  CHECK(argc == 3);
  rounds = strtol(argv[2], NULL, 10);
  ocp_error error = {0};
  device = ocp_device_open(true, 0, &error);
  CHECK(device);
  CHECK_OK(!ocp_device_enter(device, error).entered);
  CHECK_OK(ocp_library_load(OCP_CUDNN, argv[1], error));
  void *fake = dlopen(argv[1], RTLD_NOW);
  CHECK(fake);
  *(void *(**)(uint64_t, size_t))dlsym(fake, "fake_translate") = ocp_emu_host_pointer;
  *(_Atomic int64_t *)dlsym(fake, "fake_building_takes") = 1000; /* microseconds; long enough for threads to overlap */
  const ocp_problem_spec spec = {
      .kind = OCP_PROBLEM_CONV, .dtype = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, .rank = 2, .alpha = 1};
  for (int i = 0; i < NUM_CALLS; i++)
    CHECK((problems[i] = ocp_problem_create(&spec, &error)));
  pthread_t threads[NUM_THREADS];
  for (int i = 0; i < NUM_THREADS; i++)
    CHECK(pthread_create(&threads[i], NULL, run_calls, NULL) == 0);
  for (int i = 0; i < NUM_THREADS; i++)
    CHECK(pthread_join(threads[i], NULL) == 0);
  CHECK(*(_Atomic int64_t *)dlsym(fake, "fake_most_at_once") > 1);
  CHECK(*(_Atomic int64_t *)dlsym(fake, "fake_shared") == 0);
  for (int i = 0; i < NUM_CALLS; i++)
    ocp_problem_release(problems[i]);
  puts("library_threads passed");
  return 0;
}
