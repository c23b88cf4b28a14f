/* ONNX Runtime's capture of whole Runs, without ONNX Runtime: threads that run, capture and replay one session while
 * another one releases graphs.
 *
 * capture_test IMAGE PLAN STREAMS SEED ROUNDS */
#include <pthread.h>

#include "affine_cluster.h"
#include "capture.h"

enum { NUM_THREADS = 4, NUM_IDS = 3, WARM = 2 };

static ocp_capture *capture;
static long rounds;
static atomic_bool done;

/* What ORT does in a Run: memory on the stream comes and goes around the computation. */
static void run_whole(ocp_stream *stream, place *where, int id, int64_t rows) {
  CUdeviceptr before, after;
  CHECK_OK(ocp_capture_run_start(capture, id, error));
  CHECK_OK(ocp_device_alloc(device, 4096, stream, &before, error));
  CHECK(device->driver->MemsetD8Async(before, 7, 4096, stream->handle) == CUDA_SUCCESS);
  ocp_stream_enqueued(stream);
  run(stream, where, rows);
  ocp_capture_computed(stream, true);
  ocp_device_free(device, before, NULL);
  CHECK_OK(ocp_device_alloc(device, 2048, stream, &after, error));
  CHECK(device->driver->MemsetD8Async(after, 9, 2048, stream->handle) == CUDA_SUCCESS);
  ocp_stream_enqueued(stream);
  ocp_device_free(device, after, NULL);
  CHECK_OK(ocp_capture_run_end(capture, id, true, error));
}

/* As ORT: a replay where there is a graph, else Runs until there is one. */
static void run_session(ocp_stream *stream, place *where, int id, int64_t rows) {
  for (int attempts = 0; attempts < 8; attempts++) {
    ocp_error error = {0};
    if (ocp_capture_has(capture, id) && ocp_capture_replay(capture, id, &error) == ORT_OK)
      return;
    run_whole(stream, where, id, rows);
  }
}

static void *run_many(void *argument) {
  const int seed = *(const int *)argument;
  ocp_stream *stream, *own; /* what is not of a Run must not get into a capture of another thread's */
  CHECK_OK(ocp_capture_stream(capture, &stream, error));
  CHECK_OK(ocp_stream_create(device, &own, error));
  place places[NUM_IDS];
  for (int id = 0; id < NUM_IDS; id++)
    places[id] = make_place();
  for (long round = 0; round < rounds; round++) {
    const int id = (int)(round / 2 + seed) % NUM_IDS;
    const float first = (float)(seed * 100 + round % 50);
    upload(own, &places[id], first);
    CHECK_OK(ocp_stream_synchronize(own, error));
    run_session(stream, &places[id], id, id + 1);
    check_result(own, &places[id], id + 1, first);
    CUdeviceptr other; /* memory of a graph is nobody else's */
    CHECK_OK(ocp_device_alloc(device, 4096, own, &other, error));
    CHECK(device->driver->MemsetD8Async(other, 1, 4096, own->handle) == CUDA_SUCCESS);
    run_session(stream, &places[id], id, id + 1);
    unsigned char bytes[4096];
    CHECK(device->driver->MemcpyDtoHAsync(bytes, other, sizeof bytes, own->handle) == CUDA_SUCCESS);
    CHECK_OK(ocp_stream_synchronize(own, error));
    for (size_t i = 0; i < sizeof bytes; i++)
      CHECK(bytes[i] == 1);
    ocp_device_free(device, other, own);
  }
  for (int id = 0; id < NUM_IDS; id++)
    free_place(&places[id]);
  ocp_stream_release(stream);
  ocp_stream_release(own);
  return NULL;
}

static void *release_graphs(void *unused) {
  (void)unused;
  for (unsigned i = 0; !atomic_load(&done); i++) {
    ocp_capture_release(capture, (int)(i % NUM_IDS));
    for (int spin = 0; spin < 20000 && !atomic_load(&done); spin++)
      ;
  }
  return NULL;
}

static void failing_runs_leave_no_graph(void) {
  ocp_stream *stream;
  CHECK_OK(ocp_capture_stream(capture, &stream, error));
  place where = make_place();
  ocp_error error = {0};
  upload(stream, &where, 1);
  for (int i = 0; i < WARM; i++)
    run_whole(stream, &where, 5, 2);
  /* One that says so, and one that stops before its computation. */
  CHECK_OK(ocp_capture_run_start(capture, 5, error));
  ocp_capture_computed(stream, false);
  CHECK(ocp_capture_run_end(capture, 5, true, &error) != ORT_OK);
  CHECK(!ocp_capture_has(capture, 5));
  for (int i = 0; i < WARM; i++)
    run_whole(stream, &where, 5, 2);
  CHECK_OK(ocp_capture_run_start(capture, 5, error));
  CHECK(ocp_capture_run_end(capture, 5, true, &error) != ORT_OK);
  CHECK(!ocp_capture_has(capture, 5));
  /* Memory that is not at hand is an error in a captured Run, and the capture ends with one. */
  for (int i = 0; i < WARM; i++)
    run_whole(stream, &where, 5, 2);
  CUdeviceptr much;
  CHECK_OK(ocp_capture_run_start(capture, 5, error));
  CHECK(ocp_device_alloc(device, (size_t)1 << 30, stream, &much, &error) != ORT_OK);
  CHECK(ocp_capture_run_end(capture, 5, true, &error) != ORT_OK);
  for (int i = 0; i <= WARM; i++)
    run_whole(stream, &where, 5, 2);
  CHECK(ocp_capture_has(capture, 5));
  check_result(stream, &where, 2, 1);
  free_place(&where);
  ocp_stream_release(stream);
}

/* `shared`: the stream of all threads; NULL: each has one. */
static void threads_capture_and_replay(ocp_stream *shared) {
  capture = ocp_capture_create(device, shared, WARM);
  CHECK(capture);
  const long replays = atomic_load(&ocp_counters[OCP_GRAPH_REPLAYS]);
  atomic_store(&done, false);
  failing_runs_leave_no_graph();
  pthread_t threads[NUM_THREADS], releasing;
  int seeds[NUM_THREADS];
  CHECK(pthread_create(&releasing, NULL, release_graphs, NULL) == 0);
  for (int i = 0; i < NUM_THREADS; i++) {
    seeds[i] = i;
    CHECK(pthread_create(&threads[i], NULL, run_many, &seeds[i]) == 0);
  }
  for (int i = 0; i < NUM_THREADS; i++)
    CHECK(pthread_join(threads[i], NULL) == 0);
  atomic_store(&done, true);
  CHECK(pthread_join(releasing, NULL) == 0);
  CHECK(atomic_load(&ocp_counters[OCP_GRAPH_REPLAYS]) > replays);
  ocp_capture_destroy(capture);
}

int main(int argc, char **argv) {
  CHECK(argc == 6);
  make_affine_cluster(argv + 1);
  rounds = strtol(argv[5], NULL, 10);
  ocp_stream *stream;
  CHECK_OK(ocp_stream_create(device, &stream, error));
  threads_capture_and_replay(NULL);
  threads_capture_and_replay(stream);
  ocp_stream_release(stream);
  release_affine_cluster();
  puts("capture_test passed");
  return 0;
}
