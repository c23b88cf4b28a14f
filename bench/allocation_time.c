/* Benchmark of the arena: nanoseconds of an allocation that a cached chunk serves, and of its free. Measures one
 * thread, four threads on one arena, and for comparison the driver. Prints CPU time and elapsed time per pair of
 * calls. The device is the emulated one, or the first GPU if the program gets an argument. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/error.h"
#include "device/device.h"
#include "device/memory/memory.h"
#include "device/open/devices.h"
#include "device/stream.h"
#include "driver/driver.h"

enum { PAIRS = 200000, BATCHES = 20, MOST_THREADS = 4 };

static ocp_device *device;

static double now(clockid_t clock) {
  struct timespec time;
  clock_gettime(clock, &time);
  return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

static void fail(const char *text) {
  fprintf(stderr, "%s\n", text);
  exit(1);
}

static void *arena_pairs(void *argument) {
  ocp_stream *stream = argument;
  ocp_error error;
  CUdeviceptr address;
  for (int i = 0; i < PAIRS; i++) {
    if (ocp_device_alloc(device, 4096 + 512 * (size_t)(i % 7), stream, &address, &error) != ORT_OK)
      fail(error.text);
    ocp_device_free(device, address, stream);
  }
  return NULL;
}

static void *driver_pairs(void *argument) {
  (void)argument;
  ocp_error error;
  CUdeviceptr address;
  if (ocp_device_enter(device, &error) != ORT_OK)
    fail(error.text);
  for (int i = 0; i < PAIRS; i++) {
    if (device->driver->MemAlloc(&address, 4096 + 512 * (size_t)(i % 7)) != CUDA_SUCCESS)
      fail("cuMemAlloc failed");
    device->driver->MemFree(address);
  }
  return NULL;
}

static void measure(const char *what, void *(*pairs)(void *), int num_threads) {
  pthread_t threads[MOST_THREADS];
  ocp_stream *streams[MOST_THREADS];
  ocp_error error;
  double cpu = 1e9, wall = 1e9;
  for (int i = 0; i < num_threads; i++)
    if (ocp_stream_create(device, &streams[i], &error) != ORT_OK)
      fail(error.text);
  for (int batch = 0; batch < BATCHES; batch++) {
    const double cpu_start = now(CLOCK_PROCESS_CPUTIME_ID), wall_start = now(CLOCK_MONOTONIC);
    for (int i = 0; i < num_threads; i++)
      if (pthread_create(&threads[i], NULL, pairs, streams[i]))
        fail("no thread");
    for (int i = 0; i < num_threads; i++)
      pthread_join(threads[i], NULL);
    const double cpu_ns = (now(CLOCK_PROCESS_CPUTIME_ID) - cpu_start) / ((double)PAIRS * num_threads);
    const double wall_ns = (now(CLOCK_MONOTONIC) - wall_start) / PAIRS;
    cpu = cpu_ns < cpu ? cpu_ns : cpu;
    wall = wall_ns < wall ? wall_ns : wall;
  }
  for (int i = 0; i < num_threads; i++)
    ocp_stream_release(streams[i]);
  printf("%s, %d thread%s: %.0f ns of processor time, %.0f ns elapsed in a thread\n", what, num_threads,
         num_threads > 1 ? "s" : "", cpu, wall);
}

int main(int argc, char **argv) {
  (void)argv;
  ocp_error error = {0};
  device = ocp_device_open(argc < 2, 0, &error); /* any argument: the first GPU */
  if (!device)
    fail(error.text);
  measure("arena", arena_pairs, 1);
  measure("arena", arena_pairs, MOST_THREADS);
  measure("driver", driver_pairs, 1);
  ocp_device_trim(device);
  return 0;
}
