#include "fake_driver.h"

#include <string.h>

atomic_int driver_calls;
atomic_ullong bytes_live;
static atomic_ullong next_address = 0x7000000000;
uint64_t capacity = (uint64_t)1 << 40;
CUresult synchronize_result = CUDA_SUCCESS, free_result = CUDA_SUCCESS;
static pthread_mutex_t blocks_lock = PTHREAD_MUTEX_INITIALIZER;
static struct block {
  uint64_t address, bytes;
} blocks[1 << 16];
static size_t num_blocks;

static CUresult ctx_get_current(CUcontext *context) {
  *context = NULL;
  return CUDA_SUCCESS;
}

static CUresult ctx_set_current(CUcontext context) {
  (void)context;
  return CUDA_SUCCESS;
}

static CUresult exchange_capture_mode(int *mode) {
  static _Thread_local int thread_mode;
  const int before = thread_mode;
  thread_mode = *mode;
  *mode = before;
  return CUDA_SUCCESS;
}

static CUresult get_error_text(CUresult error, const char **text) {
  *text = error == CUDA_ERROR_LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED" : "some error";
  return CUDA_SUCCESS;
}

static CUresult mem_alloc(CUdeviceptr *address, size_t bytes) {
  atomic_fetch_add(&driver_calls, 1);
  if (atomic_fetch_add(&bytes_live, bytes) + bytes > capacity) {
    atomic_fetch_sub(&bytes_live, bytes);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *address = atomic_fetch_add(&next_address, (bytes + 4095) / 4096 * 4096);
  pthread_mutex_lock(&blocks_lock);
  CHECK(num_blocks < sizeof blocks / sizeof *blocks);
  blocks[num_blocks++] = (struct block){*address, bytes};
  pthread_mutex_unlock(&blocks_lock);
  return CUDA_SUCCESS;
}

static CUresult mem_free(CUdeviceptr address) {
  atomic_fetch_add(&driver_calls, 1);
  if (free_result != CUDA_SUCCESS)
    return free_result;
  pthread_mutex_lock(&blocks_lock);
  for (size_t i = 0; i < num_blocks; i++)
    if (blocks[i].address == address) {
      atomic_fetch_sub(&bytes_live, blocks[i].bytes);
      blocks[i] = blocks[--num_blocks];
      pthread_mutex_unlock(&blocks_lock);
      return CUDA_SUCCESS;
    }
  CHECK(!"an address that MemAlloc gave");
  return CUDA_ERROR_INVALID_VALUE;
}

static CUresult mem_host_alloc(void **address, size_t bytes, unsigned flags) {
  (void)flags;
  CUdeviceptr device = 0;
  CUresult result = mem_alloc(&device, bytes);
  *address = (void *)(uintptr_t)device;
  return result;
}

static CUresult mem_free_host(void *address) { return mem_free((CUdeviceptr)(uintptr_t)address); }

static CUresult mem_get_info(size_t *free_bytes, size_t *total) {
  *free_bytes = capacity - atomic_load(&bytes_live);
  *total = capacity;
  return CUDA_SUCCESS;
}

static CUresult stream_create(CUstream *stream, unsigned flags) {
  (void)flags;
  *stream = calloc(1, sizeof **stream);
  return CUDA_SUCCESS;
}

static CUresult stream_destroy(CUstream stream) {
  free(stream);
  return CUDA_SUCCESS;
}

static CUresult end_capture(CUstream stream) {
  stream->capturing = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

static CUresult stream_synchronize(CUstream stream) {
  atomic_fetch_add(&driver_calls, 1);
  if (stream->capturing || stream->capturing_result)
    return end_capture(stream);
  if (synchronize_result == CUDA_SUCCESS)
    atomic_store(&stream->done, atomic_load(&stream->enqueued));
  return synchronize_result;
}

static CUresult stream_is_capturing(CUstream stream, int *status) {
  *status = stream->capturing;
  return stream->capturing_result;
}

static CUresult stream_query(CUstream stream) {
  atomic_fetch_add(&driver_calls, 1);
  if (stream->capturing || stream->capturing_result)
    return end_capture(stream);
  return atomic_load(&stream->done) == atomic_load(&stream->enqueued) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

static const ocp_driver fake_driver = {
    .GetErrorName = get_error_text,
    .GetErrorString = get_error_text,
    .CtxGetCurrent = ctx_get_current,
    .CtxSetCurrent = ctx_set_current,
    .MemGetInfo = mem_get_info,
    .MemAlloc = mem_alloc,
    .MemFree = mem_free,
    .MemHostAlloc = mem_host_alloc,
    .MemFreeHost = mem_free_host,
    .StreamCreate = stream_create,
    .StreamDestroy = stream_destroy,
    .StreamSynchronize = stream_synchronize,
    .StreamQuery = stream_query,
    .StreamIsCapturing = stream_is_capturing,
    .ThreadExchangeStreamCaptureMode = exchange_capture_mode,
};

ocp_device *device;

void make_device(void) {
  static ocp_device fake;
  fake.driver = &fake_driver;
  fake.pool = ocp_pool_create();
  device = &fake;
}

ocp_stream *make_stream(void) {
  ocp_stream *stream = NULL;
  CHECK_OK(ocp_stream_create(device, &stream, error));
  return stream;
}

void enqueue(ocp_stream *stream) {
  atomic_fetch_add(&stream->handle->enqueued, 1);
  ocp_stream_enqueued(stream);
}

CUdeviceptr alloc_on(ocp_stream *stream, size_t bytes) {
  CUdeviceptr address = 0;
  CHECK_OK(ocp_device_alloc(device, bytes, stream, &address, error));
  CHECK(address != 0 && address % 256 == 0);
  return address;
}

int64_t in_use(void) { return atomic_load(&ocp_counters[OCP_DEVICE_BYTES_IN_USE]); }

void synchronize(ocp_stream *stream) { CHECK_OK(ocp_stream_synchronize(stream, error)); }

void configure(int memory, const char *options) {
  enum { MAX_OPTIONS = 10 };
  char text[500];
  const char *keys[MAX_OPTIONS], *values[MAX_OPTIONS];
  size_t count = 0;
  snprintf(text, sizeof text, "%s", options);
  for (char *rest = text, *option; (option = strtok_r(rest, " ", &rest)); count++) {
    keys[count] = strtok_r(option, "=", &option);
    values[count] = option;
  }
  ocp_arena_config config;
  uint32_t given = 0;
  ocp_arena_config_defaults(&config);
  CHECK_OK(ocp_arena_config_parse(keys, values, count, &config, &given, error));
  ocp_pool_configure(device->pool, memory, &config);
}

int run_tests(const test *tests, size_t count, int argc, char **argv) {
  int ran = 0;
  for (size_t i = 0; i < count; i++)
    if (argc == 1 || strcmp(argv[1], tests[i].name) == 0) {
      ocp_device_trim(device); /* each test begins without cached memory */
      tests[i].run();
      printf("%s\n", tests[i].name);
      ran++;
    }
  return ran ? 0 : 2;
}
