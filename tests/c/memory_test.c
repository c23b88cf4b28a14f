/* Tests of stream-ordered memory. The command line names one test; without a name, all run. `time` prints the
 * nanoseconds of a cached allocation and its free: on one thread, and the processor time on four threads. */
#include <pthread.h>
#include <string.h>
#include <time.h>

#include "fake_driver.h"

/* ---- tests ---- */

static void test_a_cached_chunk_needs_no_driver_call(void) {
  ocp_stream *stream = make_stream();
  ocp_device_free(device, alloc_on(stream, 5000), stream);
  synchronize(stream);
  ocp_device_free(device, alloc_on(NULL, 70000), NULL);
  int before = atomic_load(&driver_calls);
  ocp_device_free(device, alloc_on(stream, 5000), stream);
  ocp_device_free(device, alloc_on(stream, 70000), NULL);
  CHECK(atomic_load(&driver_calls) == before);
  ocp_stream_release(stream);
}

static void test_memory_freed_on_a_stream_is_reused_there_at_once(void) {
  ocp_stream *stream = make_stream();
  CUdeviceptr address = alloc_on(stream, 1000);
  enqueue(stream);
  ocp_device_free(device, address, stream);
  CHECK(alloc_on(stream, 1000) == address);
  ocp_device_free(device, address, stream);
  synchronize(stream);
  ocp_stream_release(stream);
}

static void test_another_stream_gets_it_after_the_work_has_finished(void) {
  ocp_stream *stream = make_stream(), *other = make_stream();
  CUdeviceptr address = alloc_on(stream, 1000);
  enqueue(stream);
  ocp_device_free(device, address, stream);
  enqueue(other);
  CUdeviceptr fresh = alloc_on(other, 1000), anywhere = alloc_on(NULL, 1000);
  CHECK(fresh != address && anywhere != address);
  enqueue(stream); /* work enqueued after the free does not delay the reuse */
  atomic_store(&stream->handle->done, 1);
  CUdeviceptr still_fresh = alloc_on(other, 1000);
  CHECK(still_fresh != address); /* the pool does not know yet that the work has finished */
  synchronize(stream);
  enqueue(stream);
  CHECK(alloc_on(other, 1000) == address);
  CUdeviceptr all[] = {address, fresh, anywhere, still_fresh};
  for (size_t i = 0; i < 4; i++)
    ocp_device_free(device, all[i], NULL);
  ocp_stream_release(stream);
  ocp_stream_release(other);
}

static void test_memory_freed_without_a_stream_waits_for_every_other_one(void) {
  ocp_stream *stream = make_stream(), *reader = make_stream(), *idle = make_stream();
  CUdeviceptr address = alloc_on(stream, 3000);
  enqueue(stream);
  enqueue(reader);
  ocp_device_free(device, address, NULL);
  CUdeviceptr first = alloc_on(stream, 3000), second = alloc_on(idle, 3000), third = alloc_on(NULL, 3000);
  CHECK(first != address && second != address && third != address);
  synchronize(reader);
  CHECK(alloc_on(stream, 3000) == address); /* on this stream, the reuse is ordered after the stream's own work */
  ocp_device_free(device, address, NULL);
  CUdeviceptr fourth = alloc_on(idle, 3000);
  CHECK(fourth != address);
  synchronize(stream);
  CHECK(alloc_on(idle, 3000) == address);
  CUdeviceptr all[] = {address, first, second, third, fourth};
  for (size_t i = 0; i < 5; i++)
    ocp_device_free(device, all[i], NULL);
  ocp_stream_release(stream);
  ocp_stream_release(reader);
  ocp_stream_release(idle);
}

static void test_a_miss_asks_blocked_streams_for_their_progress(void) {
  configure(OCP_DEVICE_MEMORY, "arena.extend_strategy=1"); /* one region per allocation: no other chunk fits */
  ocp_stream *stream = make_stream(), *other = make_stream();
  CUdeviceptr address = alloc_on(stream, 1 << 20);
  enqueue(stream);
  ocp_device_free(device, address, stream);
  atomic_store(&stream->handle->done, atomic_load(&stream->handle->enqueued));
  CHECK(alloc_on(other, 1 << 20) == address);
  ocp_device_free(device, address, other);
  configure(OCP_DEVICE_MEMORY, "");
  ocp_stream_release(stream);
  ocp_stream_release(other);
}

static void test_a_stream_that_the_application_captures_is_asked_nothing(void) {
  configure(OCP_DEVICE_MEMORY, "arena.extend_strategy=1");
  ocp_stream *stream = make_stream(), *other = make_stream();
  stream->owned = false;
  for (int i = 0; i < 2; i++) {
    CUdeviceptr address = alloc_on(stream, 1 << 20);
    enqueue(stream);
    ocp_device_free(device, address, stream);
    if (i == 0)
      stream->handle->capturing = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    else /* the driver's answer for the default stream while another stream is captured */
      stream->handle->capturing_result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    CUdeviceptr elsewhere = alloc_on(other, 1 << 20); /* queries every stream that may be queried */
    ocp_error ignored = {0};
    CHECK(ocp_pool_synchronize(device, &ignored) == ORT_OK);
    CHECK(stream->handle->capturing == (i == 0 ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE));
    CHECK(elsewhere != address);
    stream->handle->capturing = CU_STREAM_CAPTURE_STATUS_NONE;
    stream->handle->capturing_result = CUDA_SUCCESS;
    ocp_device_free(device, elsewhere, other);
    synchronize(stream);
  }
  configure(OCP_DEVICE_MEMORY, "");
  stream->owned = true;
  ocp_stream_release(stream);
  ocp_stream_release(other);
}

static void test_old_chunks_are_found_behind_many_that_are_in_use(void) {
  enum { MANY = 100 };
  ocp_stream *reader = make_stream(), *other = make_stream();
  CUdeviceptr old[MANY], young[MANY], taken[MANY];
  for (int i = 0; i < MANY; i++) {
    old[i] = alloc_on(other, 1536);
    young[i] = alloc_on(other, 1536);
  }
  for (int i = 0; i < MANY; i++)
    ocp_device_free(device, old[i], NULL);
  enqueue(reader);
  for (int i = 0; i < MANY; i++)
    ocp_device_free(device, young[i], NULL);
  uint64_t live = atomic_load(&bytes_live);
  for (int i = 0; i < MANY; i++)
    taken[i] = alloc_on(other, 1536);
  CHECK(atomic_load(&bytes_live) == live);
  for (int i = 0; i < MANY; i++)
    ocp_device_free(device, taken[i], other);
  ocp_stream_release(reader);
  ocp_stream_release(other);
}

static void test_a_stream_under_capture_is_left_alone(void) {
  ocp_stream *stream = make_stream(), *other = make_stream();
  CUdeviceptr address = alloc_on(stream, 9000);
  enqueue(stream);
  ocp_device_free(device, address, stream);
  atomic_store(&stream->capturing, true);
  atomic_store(&stream->handle->done, atomic_load(&stream->handle->enqueued));
  CUdeviceptr fresh = alloc_on(other, 9000);
  CHECK(fresh != address);
  atomic_store(&stream->capturing, false);
  ocp_device_free(device, fresh, other);
  ocp_stream_release(stream);
  ocp_stream_release(other);
}

static void test_a_released_stream_blocks_nothing(void) {
  ocp_stream *stream = make_stream(), *other = make_stream();
  CUdeviceptr address = alloc_on(stream, 20000);
  enqueue(stream);
  ocp_device_free(device, address, stream);
  ocp_stream_release(stream);
  CHECK(alloc_on(other, 20000) == address);
  ocp_device_free(device, address, other);
  ocp_stream_release(other);
}

static void test_an_event_wait_advances_the_producer(void) {
  ocp_stream *stream = make_stream(), *other = make_stream();
  CUdeviceptr address = alloc_on(stream, 20000);
  enqueue(stream);
  ocp_device_free(device, address, stream);
  uint64_t position = ocp_stream_position(stream), id = stream->priv->id;
  enqueue(stream);
  ocp_stream_completed(device, id, position);
  CHECK(!ocp_stream_is_idle(stream));
  CHECK(alloc_on(other, 20000) == address);
  ocp_stream_completed(device, 123456, UINT64_MAX); /* the id of a stream that was destroyed */
  ocp_device_free(device, address, other);
  ocp_stream_release(stream);
  ocp_stream_release(other);
}

static void test_no_bytes_give_an_address_of_their_own(void) {
  CUdeviceptr a = alloc_on(NULL, 0), b = alloc_on(NULL, 0);
  CHECK(a != b);
  ocp_device_free(device, a, NULL);
  ocp_device_free(device, b, NULL);
  ocp_device_free(device, 0, NULL);
}

static void test_chunks_fit_and_waste_little(void) {
  int64_t before = in_use();
  for (size_t bytes = 1; bytes < (size_t)1 << 33; bytes += bytes / 7 + 1) {
    int64_t used = in_use();
    CUdeviceptr address = alloc_on(NULL, bytes);
    size_t size = (size_t)(in_use() - used);
    CHECK(size >= bytes && size % 256 == 0 && size <= bytes + bytes / 8 + 256);
    ocp_device_free(device, address, NULL);
    CHECK(in_use() == used);
  }
  CHECK(in_use() == before);
  ocp_device_trim(device);
}

static void test_out_of_memory_takes_back_what_is_cached(void) {
  ocp_device_trim(device);
  ocp_stream *stream = make_stream();
  capacity = atomic_load(&bytes_live) + 10 * 1024;
  CUdeviceptr address = alloc_on(stream, 8192);
  enqueue(stream);
  ocp_device_free(device, address, stream);
  /* The request has another size class: the arena must free the cached chunk, after waiting for the stream that uses
   * it. */
  CUdeviceptr other = alloc_on(NULL, 5000);
  CHECK(atomic_load(&stream->handle->done) == atomic_load(&stream->handle->enqueued));
  CUdeviceptr refused = 0;
  ocp_error error = {0};
  int64_t used = in_use();
  CHECK(ocp_device_alloc(device, 9000, stream, &refused, &error) != 0 && refused == 0);
  CHECK(strstr(error.text, "out of memory") && strstr(error.text, "9000 bytes"));
  CHECK(in_use() == used);
  error.code = 0;
  CHECK(ocp_device_alloc(device, (size_t)1 << 62, stream, &refused, &error) != 0);
  CHECK(ocp_device_alloc(device, SIZE_MAX, stream, &refused, &error) != 0);
  ocp_device_free(device, other, NULL);
  /* A chunk of this request's size class would exceed the capacity; the allocation gets only the requested bytes. */
  address = alloc_on(stream, 10 * 1024 - 100);
  ocp_device_free(device, address, stream);
  capacity = (uint64_t)1 << 40;
  ocp_stream_release(stream);
}

static void test_trimming_leaves_what_is_used(void) {
  configure(OCP_DEVICE_MEMORY, "arena.extend_strategy=1"); /* each allocation gets a region of its own */
  ocp_stream *stream = make_stream();
  CUdeviceptr kept = alloc_on(stream, 1 << 20), pending = alloc_on(stream, 1 << 21);
  uint64_t live = atomic_load(&bytes_live);
  enqueue(stream);
  ocp_device_free(device, pending, stream);
  ocp_device_trim(device);
  CHECK(atomic_load(&bytes_live) == live);
  synchronize(stream);
  ocp_device_trim(device);
  CHECK(atomic_load(&bytes_live) == live - (1 << 21));
  ocp_device_free(device, kept, NULL);
  ocp_device_trim(device);
  CHECK(atomic_load(&bytes_live) == live - (1 << 21) - (1 << 20));
  ocp_stream_release(stream);
  configure(OCP_DEVICE_MEMORY, "");
}

static void test_pinned_memory_waits_for_copies_that_use_it(void) {
  ocp_stream *stream = make_stream();
  uint64_t address = 0, other = 0;
  CHECK_OK(ocp_pool_alloc(device, OCP_PINNED_MEMORY, 4096, NULL, &address, error));
  enqueue(stream);
  CHECK(ocp_pool_free(device, OCP_PINNED_MEMORY, address, NULL));
  CHECK_OK(ocp_pool_alloc(device, OCP_PINNED_MEMORY, 4096, NULL, &other, error));
  CHECK(other != address);
  synchronize(stream);
  CHECK(ocp_pool_free(device, OCP_PINNED_MEMORY, other, NULL));
  CHECK(atomic_load(&ocp_counters[OCP_PINNED_BYTES_IN_USE]) == 0);
  ocp_stream_release(stream);
}

static void test_what_was_not_handed_out_is_refused(void) {
  CUdeviceptr address = alloc_on(NULL, 777);
  CHECK(!ocp_pool_free(device, OCP_DEVICE_MEMORY, address + 256, NULL));
  CHECK(!ocp_pool_free(device, OCP_PINNED_MEMORY, address, NULL));
  CHECK(ocp_pool_free(device, OCP_DEVICE_MEMORY, address, NULL));
  CHECK(!ocp_pool_free(device, OCP_DEVICE_MEMORY, address, NULL));
}

static void test_streams_are_found_by_handle(void) {
  ocp_stream *streams[40];
  for (int i = 0; i < 40; i++)
    streams[i] = make_stream();
  for (int i = 0; i < 40; i++)
    CHECK(ocp_stream_of_handle(streams[i]->device, streams[i]->handle) == streams[i]);
  CHECK(ocp_stream_of_handle(streams[0]->device, &streams) == NULL);
  CHECK(ocp_stream_of_handle(NULL, streams[7]->handle) == streams[7] && ocp_stream_of_handle(NULL, &streams) == NULL);
  for (int i = 0; i < 40; i++)
    ocp_stream_release(streams[i]);
}

static void *settle(void *unused) {
  (void)unused;
  ocp_error error = {0};
  CHECK(ocp_device_settle(device, &error) == ORT_OK);
  return NULL;
}

static void settle_on_another_thread(void) {
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, settle, NULL) == 0);
  CHECK(pthread_join(thread, NULL) == 0);
}

static void test_what_settles_waits_for_all_work_but_that_of_other_threads_in_a_run(void) {
  ocp_stream *stream = make_stream(), *other = make_stream();
  enqueue(stream);
  settle_on_another_thread();
  CHECK(ocp_stream_is_idle(stream));
  ocp_run_started();
  enqueue(stream);
  enqueue(stream);
  settle_on_another_thread();
  CHECK(!ocp_stream_is_idle(stream));
  settle(NULL);
  CHECK(ocp_stream_is_idle(stream));
  enqueue(stream);
  ocp_run_ended(device, /*waited=*/false);
  enqueue(other);
  settle_on_another_thread();
  CHECK(ocp_stream_is_idle(stream) && ocp_stream_is_idle(other));
  /* The stream has work from before the Run, so that another thread waits for the stream. */
  enqueue(stream);
  ocp_run_started();
  enqueue(stream);
  settle_on_another_thread();
  CHECK(ocp_stream_is_idle(stream));
  enqueue(stream);
  ocp_run_ended(device, /*waited=*/true);
  settle_on_another_thread();
  CHECK(!ocp_stream_is_idle(stream)); /* the Run's own thread waits for the work, so others do not */
  synchronize(stream);
  const int before = atomic_load(&driver_calls);
  settle(NULL);
  CHECK(atomic_load(&driver_calls) == before);
  ocp_stream_release(stream);
  ocp_stream_release(other);
}

/* Tracks who uses each granule of 256 bytes. Finds memory with two users, and memory whose last user has not
 * finished. */
enum { THREADS = 4, ROUNDS = 3000, HELD = 12, GRANULE = 256, SHADOW = 1 << 19 };
typedef struct shadow {
  uint64_t granule;
  struct CUstream_st *stream; /* the stream that used the granule last */
  unsigned long long work;    /* the stream's number of enqueued operations at that time */
  bool held;
} shadow;
static shadow shadows[SHADOW];
static pthread_mutex_t shadows_lock = PTHREAD_MUTEX_INITIALIZER;

static shadow *shadow_of(uint64_t address) {
  const uint64_t granule = address / GRANULE;
  for (size_t slot = granule % SHADOW;; slot = (slot + 1) % SHADOW)
    if (shadows[slot].granule == granule || shadows[slot].granule == 0) {
      shadows[slot].granule = granule;
      return &shadows[slot];
    }
}

typedef struct piece {
  uint64_t address;
  size_t bytes;
} piece;

static void own(piece held, ocp_stream *stream) {
  pthread_mutex_lock(&shadows_lock);
  for (size_t i = 0; i < held.bytes; i += GRANULE) {
    shadow *known = shadow_of(held.address + i);
    CHECK(!known->held);
    if (known->stream && !(stream && known->stream == stream->handle))
      CHECK(atomic_load(&known->stream->done) >= known->work);
    known->held = true;
  }
  pthread_mutex_unlock(&shadows_lock);
}

static void disown(piece held, ocp_stream *stream) {
  pthread_mutex_lock(&shadows_lock);
  for (size_t i = 0; i < held.bytes; i += GRANULE) {
    shadow *known = shadow_of(held.address + i);
    CHECK(known->held);
    known->held = false;
    known->stream = stream->handle;
    known->work = atomic_load(&stream->handle->enqueued);
  }
  pthread_mutex_unlock(&shadows_lock);
}

static void hammer_free(ocp_stream *stream, piece *held, bool on_stream) {
  enqueue(stream);
  disown(*held, stream);
  ocp_device_free(device, held->address, on_stream ? stream : NULL);
  held->address = 0;
}

static void hammer_alloc(ocp_stream *stream, piece *held, unsigned *seed) {
  const unsigned how = (unsigned)rand_r(seed) % 8;
  held->bytes = (size_t)(rand_r(seed) % 60 + 1) << (rand_r(seed) % 10);
  if (how == 0)
    CHECK_OK(ocp_device_reserve(device, held->bytes, &held->address, error));
  else
    held->address = alloc_on(how > 2 ? stream : NULL, held->bytes);
  own(*held, how > 2 ? stream : NULL);
}

static void *hammer(void *argument) {
  unsigned seed = (unsigned)(uintptr_t)argument;
  ocp_stream *stream = make_stream();
  piece held[HELD] = {0};
  ocp_memory_stats stats;
  for (int round = 0; round < ROUNDS; round++) {
    const int index = rand_r(&seed) % HELD;
    if (held[index].address)
      hammer_free(stream, &held[index], rand_r(&seed) % 2);
    else
      hammer_alloc(stream, &held[index], &seed);
    switch (rand_r(&seed) % 128) {
    case 0 ... 7:
      synchronize(stream);
      ocp_pool_run_ended(device);
      break;
    case 8:
      ocp_device_trim(device);
      break;
    case 9:
      configure(OCP_DEVICE_MEMORY,
                rand_r(&seed) % 2 ? "arena.extend_strategy=1" : "arena.max_dead_bytes_per_chunk=256");
      break;
    case 10:
      ocp_pool_stats(device, OCP_DEVICE_MEMORY, &stats);
      CHECK(stats.in_use >= 0 && stats.total >= stats.in_use);
      break;
    default:
      break;
    }
  }
  for (int index = 0; index < HELD; index++)
    if (held[index].address)
      hammer_free(stream, &held[index], true);
  synchronize(stream);
  return stream;
}

static void test_threads_never_share_memory_in_use(void) {
  int64_t before = in_use();
  pthread_t threads[THREADS];
  for (uintptr_t i = 0; i < THREADS; i++)
    CHECK(pthread_create(&threads[i], NULL, hammer, (void *)(i + 1)) == 0);
  void *streams[THREADS];
  for (int i = 0; i < THREADS; i++)
    pthread_join(threads[i], &streams[i]);
  for (int i = 0; i < THREADS; i++) /* released only here, since the shadows refer to them */
    ocp_stream_release(streams[i]);
  CHECK(in_use() == before);
  configure(OCP_DEVICE_MEMORY, "");
  ocp_device_trim(device);
  CHECK(atomic_load(&bytes_live) == 0);
}

static int64_t held(void) {
  ocp_memory_stats stats;
  ocp_pool_stats(device, OCP_DEVICE_MEMORY, &stats);
  return stats.total;
}

/* Trims while each free fails with the error; returns the bytes that trimming reports as freed. */
static int64_t trim_with(CUresult result) {
  free_result = result;
  const int64_t bytes = ocp_device_trim(device);
  free_result = CUDA_SUCCESS;
  return bytes;
}

static void test_memory_whose_free_fails_stays_held_and_is_not_used_again(void) {
  enum { BYTES = 100 * 1024 };
  ocp_device_trim(device);
  const int64_t before = held();
  CUdeviceptr lost = alloc_on(NULL, BYTES);
  const int64_t region = held() - before;
  ocp_device_free(device, lost, NULL);
  CHECK(trim_with(CUDA_ERROR_UNKNOWN) == 0 && held() == before + region);
  CUdeviceptr other = alloc_on(NULL, BYTES);
  const int64_t second = held() - before - region; /* the second region may be larger than the first */
  CHECK(other != lost && second >= BYTES);
  ocp_device_free(device, other, NULL);
  const int calls = atomic_load(&driver_calls);
  CHECK(ocp_device_trim(device) == second && held() == before + region);
  CHECK(atomic_load(&driver_calls) == calls + 1); /* does not free `lost` again: it may have another owner by now */
  /* Weights bypass the arena. Memory of a weight whose free fails stays held as well. */
  CUdeviceptr weight = 0;
  CHECK_OK(ocp_device_reserve(device, BYTES, &weight, error));
  free_result = CUDA_ERROR_INVALID_VALUE;
  const int64_t reserved = held();
  ocp_device_free(device, weight, NULL);
  free_result = CUDA_SUCCESS;
  CHECK(held() == reserved && ocp_device_trim(device) == 0);
}

static void test_a_free_that_a_capture_forbids_is_repeated(void) {
  enum { BYTES = 100 * 1024 };
  ocp_device_trim(device);
  const int64_t before = held();
  ocp_device_free(device, alloc_on(NULL, BYTES), NULL);
  const int64_t region = held() - before;
  CHECK(trim_with(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) == 0 && held() == before + region);
  CHECK(ocp_device_trim(device) == region && held() == before);
}

static void test_a_lost_device_holds_nothing(void) {
  enum { BYTES = 100 * 1024 };
  ocp_device_trim(device);
  const int64_t before = held();
  ocp_device_free(device, alloc_on(NULL, BYTES), NULL);
  CHECK(trim_with(CUDA_ERROR_LAUNCH_FAILED) > 0 && held() == before);
  CHECK(atomic_load(&device->lost) == CUDA_ERROR_LAUNCH_FAILED);
  atomic_store(&device->lost, CUDA_SUCCESS);
}

static void test_a_sticky_error_loses_the_device(void) {
  ocp_stream *stream = make_stream();
  ocp_error error = {0};
  enqueue(stream);
  synchronize_result = CUDA_ERROR_LAUNCH_FAILED;
  CHECK(ocp_stream_synchronize(stream, &error) != 0 && strstr(error.text, "cuStreamSynchronize"));
  synchronize_result = CUDA_SUCCESS;
  error.code = 0;
  CHECK(!ocp_device_enter(device, &error).entered);
  CHECK(strstr(error.text, "is lost") && strstr(error.text, "CUDA_ERROR_LAUNCH_FAILED"));
  atomic_store(&device->lost, CUDA_SUCCESS);
  synchronize(stream);
  ocp_stream_release(stream);
}

enum { PAIRS = 20000 };

static void *allocate_and_free(void *stream) {
  for (int i = 0; i < PAIRS; i++)
    ocp_device_free(device, alloc_on(stream, 4096), stream);
  return NULL;
}

static double now(clockid_t clock) {
  struct timespec time;
  clock_gettime(clock, &time);
  return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

/* Returns the least time of many batches: nanoseconds of processor time per allocation and free. */
static double measure(int num_threads) {
  enum { BATCHES = 50, MOST_THREADS = 4 };
  ocp_stream *streams[MOST_THREADS];
  pthread_t threads[MOST_THREADS];
  double best = 1e9;
  for (int i = 0; i < num_threads; i++)
    streams[i] = make_stream();
  for (int batch = 0; batch < BATCHES; batch++) {
    const double start = now(CLOCK_PROCESS_CPUTIME_ID);
    for (int i = 1; i < num_threads; i++)
      CHECK(pthread_create(&threads[i], NULL, allocate_and_free, streams[i]) == 0);
    allocate_and_free(streams[0]);
    for (int i = 1; i < num_threads; i++)
      pthread_join(threads[i], NULL);
    const double ns = (now(CLOCK_PROCESS_CPUTIME_ID) - start) / (PAIRS * num_threads);
    best = ns < best ? ns : best;
  }
  for (int i = 0; i < num_threads; i++)
    ocp_stream_release(streams[i]);
  return best;
}

static void print_times(void) {
  const double alone = measure(1);
  printf("%.1f %.1f\n", alone, measure(4));
}

#define TEST(name) {#name, test_##name}
static const test tests[] = {
    TEST(a_cached_chunk_needs_no_driver_call),
    TEST(memory_freed_on_a_stream_is_reused_there_at_once),
    TEST(another_stream_gets_it_after_the_work_has_finished),
    TEST(memory_freed_without_a_stream_waits_for_every_other_one),
    TEST(a_miss_asks_blocked_streams_for_their_progress),
    TEST(a_stream_that_the_application_captures_is_asked_nothing),
    TEST(old_chunks_are_found_behind_many_that_are_in_use),
    TEST(a_stream_under_capture_is_left_alone),
    TEST(a_released_stream_blocks_nothing),
    TEST(an_event_wait_advances_the_producer),
    TEST(no_bytes_give_an_address_of_their_own),
    TEST(chunks_fit_and_waste_little),
    TEST(out_of_memory_takes_back_what_is_cached),
    TEST(trimming_leaves_what_is_used),
    TEST(pinned_memory_waits_for_copies_that_use_it),
    TEST(what_was_not_handed_out_is_refused),
    TEST(streams_are_found_by_handle),
    TEST(what_settles_waits_for_all_work_but_that_of_other_threads_in_a_run),
    TEST(threads_never_share_memory_in_use),
    TEST(memory_whose_free_fails_stays_held_and_is_not_used_again),
    TEST(a_free_that_a_capture_forbids_is_repeated),
    TEST(a_lost_device_holds_nothing),
    TEST(a_sticky_error_loses_the_device),
};

int main(int argc, char **argv) {
  make_device();
  if (argc == 2 && strcmp(argv[1], "time") == 0) {
    print_times();
    return 0;
  }
  return run_tests(tests, sizeof tests / sizeof *tests, argc, argv);
}
