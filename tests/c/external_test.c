/* Tests external memory and semaphores of the emulated device with threads: each thread's stream waits for the stream
 * of the thread before it, through a timeline semaphore, and adds its byte to imported memory. Meanwhile another thread
 * makes streams, and destroys them while they still wait. Then threads write neighboring allocations while another
 * thread exports them for CUDA IPC, and frees exported neighbors.
 *
 * Arguments: inline|adversarial SEED ROUNDS. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
#include "driver/driver.h"
#include "emulator/calls/emulator.h"
#include "emulator/calls/table.h"

enum { NUM_THREADS = 4, BYTES = 10000 };

static const ocp_driver *driver;
static CUcontext context;
static long rounds;
static int memory_file, timeline_file;
static CUdeviceptr buffer;
static atomic_bool done;

#define CUDA(call) CHECK((call) == CUDA_SUCCESS)

static int file_of(size_t bytes) {
  const int file = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  CHECK(file >= 0 && ftruncate(file, (off_t)bytes) == 0);
  return file;
}

static CUexternalSemaphore import_timeline(void) {
  CUexternalSemaphore semaphore;
  const CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC desc = {.type = CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_TIMELINE_SEMAPHORE_FD,
                                                    .handle = {.fd = dup(timeline_file)}};
  CUDA(driver->ImportExternalSemaphore(&semaphore, &desc));
  return semaphore;
}

static void wait_for(CUexternalSemaphore semaphore, CUstream stream, uint64_t value) {
  const CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS params = {.params = {.fence = value}};
  CUDA(driver->WaitExternalSemaphoresAsync(&semaphore, &params, 1, stream));
}

static void signal_value(CUexternalSemaphore semaphore, CUstream stream, uint64_t value) {
  const CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS params = {.params = {.fence = value}};
  CUDA(driver->SignalExternalSemaphoresAsync(&semaphore, &params, 1, stream));
}

static void *take_turns(void *argument) {
  const uint64_t self = (uint64_t)(uintptr_t)argument;
  CUDA(driver->CtxSetCurrent(context));
  CUexternalSemaphore semaphore = import_timeline();
  CUstream stream;
  CUevent event;
  CUDA(driver->StreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CUDA(driver->EventCreate(&event, CU_EVENT_DISABLE_TIMING));
  unsigned char seen[64] = {0};
  for (long round = 0; round < rounds; round++) {
    const uint64_t turn = (uint64_t)round * NUM_THREADS + self;
    wait_for(semaphore, stream, turn);
    /* Copies the byte that the previous thread has written in this round; for thread 0, the byte that the last thread
     * has written in the previous round. */
    CUDA(driver->MemcpyDtoDAsync(buffer + 4096 * (self % 2) + 64 * self, buffer + 8192 + 64, 64, stream));
    CUDA(driver->MemsetD8Async(buffer + 8192, (unsigned char)(turn + 1), 256, stream));
    signal_value(semaphore, stream, turn + 1);
    if (round % 7 == 0) {
      CUDA(driver->EventRecord(event, stream));
      CUDA(driver->EventSynchronize(event));
      CUDA(driver->MemcpyDtoHAsync(seen, buffer + 4096 * (self % 2) + 64 * self, 64, stream));
      CHECK(seen[0] == (unsigned char)turn && seen[63] == (unsigned char)turn);
    } else {
      (void)driver->StreamQuery(stream);
    }
  }
  CUDA(driver->StreamSynchronize(stream));
  CUDA(driver->EventDestroy(event));
  CUDA(driver->StreamDestroy(stream));
  CUDA(driver->DestroyExternalSemaphore(semaphore));
  return NULL;
}

/* Makes streams that wait for the end of all turns, and destroys them. */
static void *make_streams(void *unused) {
  (void)unused;
  CUDA(driver->CtxSetCurrent(context));
  CUexternalSemaphore semaphore = import_timeline();
  for (int i = 0; i < 50 || !atomic_load(&done); i++) {
    CUstream stream;
    CUDA(driver->StreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    wait_for(semaphore, stream, i % 2 ? 0 : (uint64_t)rounds * NUM_THREADS);
    CUDA(driver->MemsetD8Async(buffer + 9000, 1, 100, stream));
    CUDA(driver->StreamDestroy(stream));
    usleep(200);
  }
  CUDA(driver->CtxSynchronize());
  CUDA(driver->DestroyExternalSemaphore(semaphore));
  return NULL;
}

/* Writes an allocation of a page that other threads also write, and that is exported meanwhile. */
static void *write_exported(void *unused) {
  (void)unused;
  CUDA(driver->CtxSetCurrent(context));
  CUdeviceptr own;
  CUstream stream;
  CUDA(driver->MemAlloc(&own, 300));
  CUDA(driver->StreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  for (long round = 0; round < 20 * rounds; round++) {
    unsigned char seen[300] = {0};
    CUipcMemHandle handle;
    if (round == 10)
      CUDA(driver->IpcGetMemHandle(&handle, own));
    CUDA(driver->MemsetD8Async(own, (unsigned char)round, sizeof seen, stream));
    CUDA(driver->MemcpyDtoHAsync(seen, own, sizeof seen, stream));
    CUDA(driver->StreamSynchronize(stream));
    CHECK(seen[0] == (unsigned char)round && seen[299] == (unsigned char)round);
  }
  CUDA(driver->StreamDestroy(stream));
  CUDA(driver->MemFree(own));
  return NULL;
}

static void *export_and_free(void *unused) {
  (void)unused;
  CUDA(driver->CtxSetCurrent(context));
  while (!atomic_load(&done)) {
    CUdeviceptr shared;
    CUipcMemHandle handle;
    CUDA(driver->MemAlloc(&shared, 200));
    CUDA(driver->IpcGetMemHandle(&handle, shared));
    CUDA(driver->MemFree(shared));
  }
  return NULL;
}

/* Runs `work` in all threads, and `beside` in another one until they have finished. */
static void run_threads(void *(*work)(void *), void *(*beside)(void *)) {
  pthread_t threads[NUM_THREADS], other;
  atomic_store(&done, false);
  for (uintptr_t i = 0; i < NUM_THREADS; i++)
    CHECK(pthread_create(&threads[i], NULL, work, (void *)i) == 0);
  CHECK(pthread_create(&other, NULL, beside, NULL) == 0);
  for (int i = 0; i < NUM_THREADS; i++)
    pthread_join(threads[i], NULL);
  atomic_store(&done, true);
  pthread_join(other, NULL);
}

static void start(const char *streams, const char *seed) {
  const ocp_emu_config config = {.num_devices = 1,
                                 .workers = 2,
                                 .device_bytes = 64 << 20,
                                 .adversarial = strcmp(streams, "adversarial") == 0,
                                 .seed = strtoull(seed, NULL, 10)};
  char why[200];
  CHECK(ocp_emu_configure(&config, why, sizeof why) == CUDA_SUCCESS);
  driver = ocp_driver_emulator();
  CUDA(driver->Init(0));
  CUDA(driver->DevicePrimaryCtxRetain(&context, 0));
  CUDA(driver->CtxSetCurrent(context));
}

int main(int argc, char **argv) {
  CHECK(argc == 4);
  start(argv[1], argv[2]);
  rounds = strtol(argv[3], NULL, 10);
  memory_file = file_of(BYTES);
  timeline_file = file_of(16);
  CHECK(pwrite(timeline_file, "ocp-time", 8, 0) == 8);
  CUexternalMemory memory;
  const CUDA_EXTERNAL_MEMORY_HANDLE_DESC desc = {
      .type = CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD, .handle = {.fd = dup(memory_file)}, .size = BYTES};
  CUDA(driver->ImportExternalMemory(&memory, &desc));
  const CUDA_EXTERNAL_MEMORY_BUFFER_DESC range = {.offset = 0, .size = BYTES};
  CUDA(driver->ExternalMemoryGetMappedBuffer(&buffer, memory, &range));
  run_threads(take_turns, make_streams);
  unsigned char last;
  CHECK(pread(memory_file, &last, 1, 8192) == 1 && last == (unsigned char)(rounds * NUM_THREADS));
  CUDA(driver->MemFree(buffer));
  CUDA(driver->DestroyExternalMemory(memory));
  run_threads(write_exported, export_and_free);
  puts("external_test passed");
  return 0;
}
