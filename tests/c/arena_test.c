/* Tests of the arena: how it grows, splits and merges, each of its options, and what it does when memory runs out. The
 * command line names one test; without a name, all run. */
#include <string.h>

#include "fake_driver.h"

enum { KIB = 1 << 10, MIB = 1 << 20 };

static ocp_memory_stats stats_of(int memory) {
  ocp_memory_stats stats;
  ocp_pool_stats(device, memory, &stats);
  return stats;
}
static ocp_memory_stats stats(void) { return stats_of(OCP_DEVICE_MEMORY); }

static void free_now(CUdeviceptr address) { ocp_device_free(device, address, NULL); }

static CUdeviceptr refused(size_t bytes, const char *with) {
  ocp_error error = {0};
  CUdeviceptr address = 0;
  CHECK(ocp_device_alloc(device, bytes, NULL, &address, &error) != 0 && address == 0);
  if (!strstr(error.text, with)) {
    fprintf(stderr, "expected «%s» in «%s»\n", with, error.text);
    abort();
  }
  return address;
}

/* ---- chunks ---- */

static void test_one_region_serves_many_allocations(void) {
  const int64_t extensions = stats().num_extensions;
  CUdeviceptr chunks[64];
  for (int i = 0; i < 64; i++)
    chunks[i] = alloc_on(NULL, 4 * KIB);
  CHECK(stats().num_extensions == extensions + 1);
  for (int i = 1; i < 64; i++)
    CHECK(chunks[i] == chunks[i - 1] + 4 * KIB);
  for (int i = 0; i < 64; i++)
    free_now(chunks[i]);
}

static void test_neighbors_merge_in_any_order_of_frees(void) {
  static const int orders[][3] = {{0, 1, 2}, {2, 1, 0}, {0, 2, 1}, {1, 0, 2}};
  for (size_t order = 0; order < sizeof orders / sizeof *orders; order++) {
    CUdeviceptr chunks[3];
    for (int i = 0; i < 3; i++)
      chunks[i] = alloc_on(NULL, 100 * KIB);
    for (int i = 0; i < 3; i++)
      free_now(chunks[orders[order][i]]);
    CUdeviceptr all = alloc_on(NULL, 300 * KIB);
    CHECK(all == chunks[0]);
    free_now(all);
  }
}

static void test_the_smallest_chunk_that_fits_is_taken(void) {
  CUdeviceptr large = alloc_on(NULL, 300 * KIB), wall = alloc_on(NULL, 256);
  CUdeviceptr small = alloc_on(NULL, 20 * KIB), end = alloc_on(NULL, 256);
  free_now(large);
  free_now(small);
  CUdeviceptr found = alloc_on(NULL, 20 * KIB);
  CHECK(found == small);
  free_now(found);
  free_now(wall);
  free_now(end);
}

static void test_chunks_of_busy_streams_merge_when_the_run_ends(void) {
  ocp_stream *stream = make_stream(), *other = make_stream();
  CUdeviceptr first = alloc_on(stream, 512 * KIB), second = alloc_on(other, 512 * KIB);
  enqueue(stream);
  enqueue(other);
  ocp_device_free(device, first, stream);
  ocp_device_free(device, second, other);
  CHECK(stats().num_bound_chunks == 2);
  const int calls = atomic_load(&driver_calls);
  CHECK(alloc_on(stream, 512 * KIB) == first); /* the stream that freed the chunk gets it at once */
  CHECK(atomic_load(&driver_calls) == calls);
  ocp_device_free(device, first, stream);
  synchronize(stream);
  synchronize(other);
  ocp_pool_run_ended(device);
  CHECK(stats().num_bound_chunks == 0);
  CHECK(alloc_on(NULL, 1024 * KIB) == first);
  free_now(first);
  ocp_stream_release(stream);
  ocp_stream_release(other);
}

static void test_without_the_end_of_a_run_the_next_miss_releases_them(void) {
  configure(OCP_DEVICE_MEMORY, "arena.extend_strategy=1");
  ocp_stream *stream = make_stream(), *other = make_stream();
  CUdeviceptr address = alloc_on(stream, MIB);
  enqueue(stream);
  ocp_device_free(device, address, stream);
  atomic_store(&stream->handle->done,
               atomic_load(&stream->handle->enqueued)); /* the stream is idle, but the pool does not know it */
  const int64_t extensions = stats().num_extensions;
  CHECK(alloc_on(other, MIB) == address && stats().num_extensions == extensions);
  ocp_device_free(device, address, other);
  configure(OCP_DEVICE_MEMORY, "");
  ocp_stream_release(stream);
  ocp_stream_release(other);
}

static void test_a_stream_that_waited_for_another_takes_its_chunks(void) {
  configure(OCP_DEVICE_MEMORY, "arena.extend_strategy=1");
  ocp_stream *producer = make_stream(), *consumer = make_stream(), *third = make_stream();
  CUdeviceptr address = alloc_on(producer, 2 * MIB - 256);
  enqueue(producer);
  ocp_device_free(device, address, producer);
  CUdeviceptr elsewhere = alloc_on(consumer, 2 * MIB - 256);
  CHECK(elsewhere != address);
  ocp_stream_waits(consumer, producer->priv->id, ocp_stream_position(producer));
  ocp_device_free(device, elsewhere, consumer);
  enqueue(consumer);
  ocp_device_free(device, alloc_on(third, 2 * MIB - 256), third);
  CUdeviceptr again = alloc_on(consumer, 2 * MIB - 256), both = alloc_on(consumer, 2 * MIB - 256);
  CHECK(again == address || both == address);
  CHECK(!ocp_stream_is_idle(producer));
  ocp_device_free(device, again, consumer);
  ocp_device_free(device, both, consumer);
  configure(OCP_DEVICE_MEMORY, "");
  ocp_stream_release(producer);
  ocp_stream_release(consumer);
  ocp_stream_release(third);
}

static void test_a_later_free_of_the_producer_is_not_covered_by_the_wait(void) {
  ocp_stream *producer = make_stream(), *consumer = make_stream();
  CUdeviceptr address = alloc_on(producer, 2 * MIB - 256);
  enqueue(producer);
  ocp_stream_waits(consumer, producer->priv->id, ocp_stream_position(producer));
  enqueue(producer);
  ocp_device_free(device, address, producer);
  CUdeviceptr elsewhere = alloc_on(consumer, 2 * MIB - 256);
  CHECK(elsewhere != address);
  ocp_device_free(device, elsewhere, consumer);
  ocp_stream_release(producer);
  ocp_stream_release(consumer);
}

static void test_a_capturing_stream_gets_what_is_at_hand_or_an_error(void) {
  ocp_stream *stream = make_stream();
  ocp_device_free(device, alloc_on(stream, 64 * KIB), stream);
  atomic_store(&stream->capturing, true);
  const int calls = atomic_load(&driver_calls);
  CUdeviceptr address = alloc_on(stream, 64 * KIB), none = 0;
  ocp_error error = {0};
  CHECK(ocp_device_alloc(device, 64 * MIB, stream, &none, &error) != 0);
  CHECK(strstr(error.text, "67108864 bytes") && strstr(error.text, "CUDA graph"));
  CHECK(atomic_load(&driver_calls) == calls);
  atomic_store(&stream->capturing, false);
  ocp_device_free(device, address, stream);
  ocp_stream_release(stream);
}

/* ---- options ---- */

static void test_regions_double_up_to_a_largest_one(void) {
  configure(OCP_DEVICE_MEMORY, "arena.initial_growth_chunk_size_bytes=4096 arena.max_power_of_two_extend_bytes=16384");
  free_now(alloc_on(NULL, 1));
  ocp_device_trim(device); /* growth starts again, as after a shrink */
  static const int64_t regions[] = {4096, 8192, 16384, 16384, 16384};
  CUdeviceptr chunks[5];
  for (int i = 0; i < 5; i++) {
    const int64_t before = stats().total;
    chunks[i] = alloc_on(NULL, (size_t)(i < 3 ? 4096 << i : 16384));
    CHECK(stats().total == before + regions[i]);
  }
  const int64_t before = stats().total;
  CUdeviceptr large = alloc_on(NULL, 40000); /* a single request may exceed max_power_of_two_extend_bytes */
  CHECK(stats().total == before + 40192);
  free_now(large);
  for (int i = 0; i < 5; i++)
    free_now(chunks[i]);
  configure(OCP_DEVICE_MEMORY, "");
}

static void test_the_first_region_has_its_own_size(void) {
  static const char *const options[] = {"arena.initial_chunk_size_bytes=65536",
                                        "arena.initial_chunk_size_bytes=4194304 arena.max_power_of_two_extend_bytes=1"};
  for (int i = 0; i < 2; i++) {
    configure(OCP_DEVICE_MEMORY, options[i]);
    const int64_t before = stats().total;
    CUdeviceptr address = alloc_on(NULL, 100);
    CHECK(stats().total == before + (i ? 4 << 20 : 65536));
    free_now(address);
    ocp_device_trim(device);
  }
  configure(OCP_DEVICE_MEMORY, "");
}

static void test_options_may_be_as_large_as_numbers_go(void) {
  capacity = UINT64_MAX / 2;
  configure(OCP_DEVICE_MEMORY, "arena.initial_chunk_size_bytes=9223372036854775807 arena.max_mem=9223372036854775807 "
                               "arena.initial_growth_chunk_size_bytes=9223372036854775807 "
                               "arena.max_power_of_two_extend_bytes=9223372036854775807");
  for (int i = 0; i < 2; i++) { /* once for the first region, once for the first region after a shrink */
    const int64_t before = stats().total;
    CUdeviceptr address = alloc_on(NULL, 100);
    CHECK(stats().total == before + (INT64_C(1) << 47));
    free_now(address);
    ocp_device_trim(device);
  }
  capacity = (uint64_t)1 << 40;
  free_now(alloc_on(NULL, 100)); /* the first region's configured size exceeds the device's memory */
  configure(OCP_DEVICE_MEMORY, "arena.initial_chunk_size_bytes=1000000 arena.max_mem=1000"); /* more than max_mem */
  ocp_device_trim(device);
  CUdeviceptr address = alloc_on(NULL, 700);
  CHECK(stats().total == 768);
  refused(257, "limit 1000");
  free_now(address);
  configure(OCP_DEVICE_MEMORY, "");
}

static void test_same_as_requested_takes_what_is_asked_for(void) {
  configure(OCP_DEVICE_MEMORY, "arena.extend_strategy=kSameAsRequested");
  const int64_t before = stats().total;
  CUdeviceptr address = alloc_on(NULL, 5000);
  CHECK(stats().total == before + 5120);
  free_now(address);
  configure(OCP_DEVICE_MEMORY, "");
}

static int64_t idle_bytes_behind(size_t held, size_t bytes) {
  CUdeviceptr address = alloc_on(NULL, held), end = alloc_on(NULL, 256);
  free_now(address);
  const int64_t before = in_use();
  address = alloc_on(NULL, bytes);
  const int64_t idle = in_use() - before - (int64_t)bytes;
  free_now(address);
  free_now(end);
  return idle;
}

static void test_few_bytes_stay_idle_behind_a_chunk(void) {
  configure(OCP_DEVICE_MEMORY, "arena.extend_strategy=1");
  CHECK(idle_bytes_behind(1024 * KIB, 1000 * KIB) == 24 * KIB);
  CHECK(idle_bytes_behind(1024 * KIB, 800 * KIB) == 0);
  configure(OCP_DEVICE_MEMORY, "arena.extend_strategy=1 arena.max_dead_bytes_per_chunk=8192");
  CHECK(idle_bytes_behind(1024 * KIB, 1000 * KIB) == 0);
  CHECK(idle_bytes_behind(1024 * KIB, 1020 * KIB) == 4 * KIB);
  configure(OCP_DEVICE_MEMORY, "");
}

static void test_the_limit_holds_for_chunks_and_weights(void) {
  CHECK(stats().total == 0);
  configure(OCP_DEVICE_MEMORY, "arena.max_mem=1048576");
  CUdeviceptr half = alloc_on(NULL, 512 * KIB), weight = 0;
  ocp_error error = {0};
  CHECK(stats().total == MIB && stats().limit == MIB);
  refused(600 * KIB, "limit 1048576");
  CHECK(ocp_device_reserve(device, 600 * KIB, &weight, &error) != 0 && strstr(error.text, "614400 bytes wanted"));
  free_now(half);
  CHECK_OK(ocp_device_reserve(device, 600 * KIB, &weight, error)); /* the arena frees its idle region for it */
  CHECK(stats().total == 600 * KIB);
  CUdeviceptr rest = alloc_on(NULL, 400 * KIB); /* a region as small as the request: growth would exceed the limit */
  CHECK(stats().total == MIB);
  configure(OCP_DEVICE_MEMORY, "arena.max_mem=1000"); /* below the bytes that are held, which stay valid */
  refused(600 * KIB, "limit 1000");
  free_now(rest);
  free_now(weight);
  configure(OCP_DEVICE_MEMORY, "");
  free_now(alloc_on(NULL, 600 * KIB));
}

static void test_pinned_memory_has_options_of_its_own(void) {
  configure(OCP_PINNED_MEMORY, "arena.max_mem=4096");
  uint64_t address = 0;
  ocp_error error = {0};
  CHECK(ocp_pool_alloc(device, OCP_PINNED_MEMORY, 5000, NULL, &address, &error) != 0 &&
        strstr(error.text, "of pinned host memory"));
  free_now(alloc_on(NULL, 5000));
  CHECK_OK(ocp_pool_alloc(device, OCP_PINNED_MEMORY, 4000, NULL, &address, error));
  CHECK(stats_of(OCP_PINNED_MEMORY).total == 4096);
  CHECK(ocp_pool_free(device, OCP_PINNED_MEMORY, address, NULL));
  configure(OCP_PINNED_MEMORY, "");
}

static void check_parse_fails(const char *key, const char *value, const char *with) {
  ocp_error error = {0};
  CHECK(ocp_arena_check(&key, &value, 1, &error) != 0);
  if (!strstr(error.text, with) || !strstr(error.text, key)) {
    fprintf(stderr, "«%s» in «%s»\n", with, error.text);
    abort();
  }
}

static void test_keys_and_values_are_checked(void) {
  check_parse_fails("arena.max_memory", "1", "known: arena.extend_strategy, ");
  check_parse_fails("arena.extend_strategy", "2", "0 (kNextPowerOfTwo) or 1 (kSameAsRequested)");
  check_parse_fails("arena.max_mem", "1T", "a number of bytes such as 2G, 0 for no limit");
  check_parse_fails("arena.max_mem", "", "a number of bytes");
  check_parse_fails("arena.max_mem", "-2", "a number of bytes");
  check_parse_fails("arena.max_mem", "99999999999999999999999", "a number of bytes");
  check_parse_fails("arena.initial_chunk_size_bytes", "0", "from 1");
  check_parse_fails("arena.use_cuda_mempool", "maybe", "0 or 1");
  check_parse_fails("arena.cuda_mempool_release_threshold", "x", "a number of bytes");
  static const char *const keys[] = {"arena.max_mem", "arena.max_dead_bytes_per_chunk", "arena.extend_strategy"};
  static const char *const values[] = {"18446744073709551615", "-1", "kSameAsRequested"};
  ocp_arena_config config;
  uint32_t given = 0;
  CHECK_OK(ocp_arena_config_parse(keys, values, 3, &config, &given, error));
  CHECK(config.max_mem == INT64_MAX && config.max_dead_bytes_per_chunk == 128 << 20 && config.extend_strategy == 1);
}

static void test_later_options_that_differ_are_refused_by_name(void) {
  enum { ORDINAL = 5 };
  static const char *const keys[] = {"arena.max_mem", "arena.extend_strategy"};
  static const char *const first[] = {"1000000", "1"}, *const second[] = {"2000000", "1"};
  char warning[OCP_ARENA_WARNING_BYTES];
  for (int life = 0; life < 2; life++) {
    ocp_arena_retain(true, ORDINAL, OCP_DEVICE_MEMORY);
    for (int again = 0; again < 2; again++) {
      CHECK_OK(ocp_arena_configure(1, ORDINAL, OCP_DEVICE_MEMORY, keys, first, 2, warning, error));
      CHECK(!*warning);
    }
    CHECK_OK(ocp_arena_configure(1, ORDINAL, OCP_DEVICE_MEMORY, keys, second, 2, warning, error));
    CHECK(strstr(warning, "arena.max_mem and keeps") && !strstr(warning, "extend_strategy"));
    CHECK_OK(ocp_arena_configure(1, ORDINAL, OCP_DEVICE_MEMORY, keys, second, 2, warning, error));
    CHECK(!*warning); /* the same warning is not repeated */
    CHECK(ocp_arena_release(true, ORDINAL, OCP_DEVICE_MEMORY));
  }
  CHECK_OK(ocp_arena_configure(1, ORDINAL, OCP_DEVICE_MEMORY, keys, second, 2, warning, error));
  CHECK(!*warning); /* the arena has no user any more, so the options are not kept */
}

/* ---- reserved memory, shrinking and reclaiming ---- */

static void test_reserved_memory_bypasses_the_arena(void) {
  const uint64_t live = atomic_load(&bytes_live);
  const ocp_memory_stats before = stats();
  CUdeviceptr weight = 0;
  CHECK_OK(ocp_device_reserve(device, 10000, &weight, error));
  CHECK(atomic_load(&bytes_live) == live + 10240);
  const ocp_memory_stats now = stats();
  CHECK(now.num_reserves == before.num_reserves + 1 && now.num_extensions == before.num_extensions);
  CHECK(now.weights == before.weights + 10240 && now.in_use == before.in_use + 10240);
  free_now(weight); /* no stream is busy: freed at once */
  CHECK(atomic_load(&bytes_live) == live && stats().weights == before.weights);
  ocp_stream *stream = make_stream();
  CHECK_OK(ocp_device_reserve(device, 10000, &weight, error));
  enqueue(stream);
  free_now(weight);
  CHECK(atomic_load(&bytes_live) == live + 10240); /* the stream may still read it */
  synchronize(stream);
  ocp_device_trim(device);
  CHECK(atomic_load(&bytes_live) == live);
  ocp_stream_release(stream);
}

static void test_a_shrink_gives_back_unused_regions_only(void) {
  const uint64_t live = atomic_load(&bytes_live);
  CUdeviceptr first = alloc_on(NULL, 2 * MIB), second = alloc_on(NULL, 8 * MIB);
  const int64_t shrinkages = stats().num_shrinkages;
  free_now(second);
  CHECK(ocp_pool_shrink(device, OCP_DEVICE_MEMORY, true) == 8 * MIB);
  CHECK(stats().num_shrinkages == shrinkages + 1 && atomic_load(&bytes_live) == live + 2 * MIB);
  free_now(first);
  CHECK(ocp_device_trim(device) == 2 * MIB && atomic_load(&bytes_live) == live);
}

typedef struct keeper {
  ocp_reclaimer reclaimer; /* first member: give_up casts the reclaimer to its keeper */
  CUdeviceptr slab;
  int calls;
} keeper;

static void give_up(ocp_reclaimer *self) {
  keeper *k = (keeper *)(void *)self;
  k->calls++;
  if (k->slab)
    free_now(k->slab);
  k->slab = 0;
}

static void test_others_give_up_what_they_keep_before_an_allocation_fails(void) {
  capacity = atomic_load(&bytes_live) + 4 * MIB;
  keeper keepers[2] = {{.reclaimer.reclaim = give_up, .slab = alloc_on(NULL, 2 * MIB)},
                       {.reclaimer.reclaim = give_up, .slab = alloc_on(NULL, 2 * MIB)}};
  for (int i = 0; i < 2; i++)
    ocp_reclaimer_add(device, &keepers[i].reclaimer);
  CUdeviceptr address = alloc_on(NULL, 4 * MIB);
  CHECK(keepers[0].calls == 1 && keepers[1].calls == 1);
  refused(MIB, "out of memory");
  refused(MIB, "weights 0) of the 4194304 bytes that it holds");
  free_now(address);
  free_now(alloc_on(NULL, MIB)); /* after the keepers freed their slabs, allocations succeed */
  for (int i = 0; i < 2; i++)
    ocp_reclaimer_remove(device, &keepers[i].reclaimer);
  capacity = (uint64_t)1 << 40;
}

#define TEST(name) {#name, test_##name}
static const test tests[] = {
    TEST(one_region_serves_many_allocations),
    TEST(neighbors_merge_in_any_order_of_frees),
    TEST(the_smallest_chunk_that_fits_is_taken),
    TEST(chunks_of_busy_streams_merge_when_the_run_ends),
    TEST(without_the_end_of_a_run_the_next_miss_releases_them),
    TEST(a_stream_that_waited_for_another_takes_its_chunks),
    TEST(a_later_free_of_the_producer_is_not_covered_by_the_wait),
    TEST(a_capturing_stream_gets_what_is_at_hand_or_an_error),
    TEST(regions_double_up_to_a_largest_one),
    TEST(the_first_region_has_its_own_size),
    TEST(options_may_be_as_large_as_numbers_go),
    TEST(same_as_requested_takes_what_is_asked_for),
    TEST(few_bytes_stay_idle_behind_a_chunk),
    TEST(the_limit_holds_for_chunks_and_weights),
    TEST(pinned_memory_has_options_of_its_own),
    TEST(keys_and_values_are_checked),
    TEST(later_options_that_differ_are_refused_by_name),
    TEST(reserved_memory_bypasses_the_arena),
    TEST(a_shrink_gives_back_unused_regions_only),
    TEST(others_give_up_what_they_keep_before_an_allocation_fails),
};

int main(int argc, char **argv) {
  make_device();
  return run_tests(tests, sizeof tests / sizeof *tests, argc, argv);
}
