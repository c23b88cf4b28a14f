/* A fake CUDA driver and a device on it. Memory is only addresses; streams finish their work when the test says so. */
#ifndef OCP_TESTS_FAKE_DRIVER_H
#define OCP_TESTS_FAKE_DRIVER_H

#include "base/counters.h"
#include "base/error.h"
#include "check.h"
#include "device/arena_options.h"
#include "device/device.h"
#include "device/memory/memory.h"
#include "device/open/arena_settings.h"
#include "device/order.h"
#include "device/pool.h"
#include "device/stream.h"
#include "device/wait.h"
#include "driver/driver.h"

/* A stream: numbers of enqueued and of finished operations. Querying a stream that the application captures invalidates
 * the capture, as in CUDA. */
struct CUstream_st {
  atomic_ullong enqueued, done;
  CUresult capturing_result;
  int capturing; /* CU_STREAM_CAPTURE_STATUS_NONE, or another status */
};

extern atomic_int driver_calls;
extern atomic_ullong bytes_live; /* bytes allocated and not freed */
extern uint64_t capacity;        /* bytes of the device's memory; a test may change it */
extern CUresult synchronize_result, free_result;
extern ocp_device *device;

void make_device(void);
ocp_stream *make_stream(void);
void enqueue(ocp_stream *stream);
void synchronize(ocp_stream *stream);
CUdeviceptr alloc_on(ocp_stream *stream, size_t bytes);
int64_t in_use(void);
/* Sets the options of the device's arena, such as "arena.max_mem=1000 ..."; other options get their defaults. Tests end
 * with "". */
void configure(int memory, const char *options);

/* Runs the test that the command line names, or all tests; returns the exit status for main. */
typedef struct test {
  const char *name;
  void (*run)(void);
} test;
int run_tests(const test *tests, size_t count, int argc, char **argv);

#endif
