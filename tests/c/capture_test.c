/* Tests the capture of whole Runs without ONNX Runtime: threads run, capture and replay one session while another
 * thread releases graphs.
 *
 * Arguments: IMAGE PLAN STREAMS SEED (affine_cluster.h) ROUNDS. */
#include <pthread.h>
#include <unistd.h>

#include "affine_cluster.h"
#include "base/counters.h"
#include "base/error.h"
#include "device/device.h"
#include "device/memory/memory.h"
#include "device/order.h"
#include "device/stream.h"
#include "driver/driver.h"
#include "ort/data/capture.h"

enum { NUM_THREADS = 4, NUM_IDS = 3, WARM = 2 };

static ocp_capture *capture;
static long rounds;
static atomic_bool done;

/* Imitates a Run of ORT: allocates and frees memory on the stream before and after the computation. */
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

/* Imitates a session of ORT: replays the graph if there is one, else repeats Runs until there is one. */
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
  ocp_stream *stream, *own; /* this thread's stream outside of Runs: other threads' captures must not record its work */
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
    CUdeviceptr other; /* must not get memory that a graph uses */
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
    ocp_device_trim(device);
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
  /* Two captured Runs without a graph: one in which a cluster call fails, and one without any cluster call. */
  CHECK_OK(ocp_capture_run_start(capture, 5, error));
  ocp_capture_computed(stream, false);
  CHECK(ocp_capture_run_end(capture, 5, true, &error) != ORT_OK);
  CHECK(!ocp_capture_has(capture, 5));
  for (int i = 0; i < WARM; i++)
    run_whole(stream, &where, 5, 2);
  CHECK_OK(ocp_capture_run_start(capture, 5, error));
  CHECK(ocp_capture_run_end(capture, 5, true, &error) != ORT_OK);
  CHECK(!ocp_capture_has(capture, 5));
  /* If an allocation in a captured Run needs the driver, it fails, and the capture ends with that error. */
  for (int i = 0; i < WARM; i++)
    run_whole(stream, &where, 5, 2);
  CUdeviceptr much;
  CHECK_OK(ocp_capture_run_start(capture, 5, error));
  CHECK(ocp_device_alloc(device, (size_t)1 << 30, stream, &much, &error) != ORT_OK);
  CHECK(ocp_capture_run_end(capture, 5, true, &error) != ORT_OK);
  /* After an exception ORT does not end the Run. The thread's next Run abandons it, whatever its id. */
  for (int runs = 0; runs <= WARM; runs++) {
    for (int i = 0; i < runs; i++)
      run_whole(stream, &where, 5, 2);
    CHECK_OK(ocp_capture_run_start(capture, 5, error));
    CHECK_OK(ocp_device_alloc(device, 4096, stream, &much, error));
    ocp_device_free(device, much, NULL);
    ocp_capture_forget_run();
    ocp_capture_release(capture, 5); /* has no effect: the Run may still be in progress */
    CHECK_OK(ocp_capture_run_start(capture, OCP_NO_CAPTURE, error));
    CHECK_OK(ocp_capture_run_end(capture, OCP_NO_CAPTURE, true, error));
    ocp_capture_release(capture, 5);
  }
  for (int i = 0; i <= WARM; i++)
    run_whole(stream, &where, 5, 2);
  CHECK(ocp_capture_has(capture, 5));
  check_result(stream, &where, 2, 1);
  free_place(&where);
  ocp_stream_release(stream);
}

/* ---- releasing an id frees its graph and memory ---- */

static int64_t bytes_in_use(void) { return atomic_load(&ocp_counters[OCP_DEVICE_BYTES_IN_USE]); }

enum { FIRST_ID = 100, LAST_ID = 105 };

/* Captures even ids. Odd ids get one Run less, so they have no graph, but keep the memory of their last warm Run. */
static void *capture_some(void *where) {
  ocp_stream *stream;
  CHECK_OK(!ocp_device_enter(device, error).entered);
  CHECK_OK(ocp_capture_stream(capture, &stream, error));
  const int64_t before = bytes_in_use();
  for (int id = FIRST_ID; id <= LAST_ID; id++)
    for (int runs = 0; runs <= WARM - id % 2; runs++)
      run_whole(stream, where, id, 2);
  CHECK(ocp_capture_has(capture, FIRST_ID) && !ocp_capture_has(capture, LAST_ID));
  CHECK(bytes_in_use() > before);
  ocp_stream_release(stream);
  return NULL;
}

static void releasing_an_id_or_the_end_of_its_thread_frees_all(void) {
  place where = make_place();
  const int64_t before = bytes_in_use(), graphs = atomic_load(&ocp_counters[OCP_GRAPHS_LIVE]);
  capture_some(&where);
  for (int id = FIRST_ID; id <= LAST_ID; id++)
    ocp_capture_release(capture, id);
  CHECK(bytes_in_use() == before && atomic_load(&ocp_counters[OCP_GRAPHS_LIVE]) == graphs);
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, capture_some, &where) == 0 && pthread_join(thread, NULL) == 0);
  CHECK(bytes_in_use() == before && atomic_load(&ocp_counters[OCP_GRAPHS_LIVE]) == graphs);
  free_place(&where);
}

/* ---- a thread queries a stream whose capture is about to begin ---- */

static atomic_bool querying, capturing;

static CUresult slow_query(CUstream stream) {
  atomic_store(&querying, true);
  for (int i = 0; i < 50; i++) {
    CHECK(!atomic_load(&capturing)); /* a query would invalidate a capture */
    usleep(1000);
  }
  return real->StreamQuery(stream);
}

static CUresult begin_capture(CUstream stream, int mode) {
  atomic_store(&capturing, true);
  return real->StreamBeginCapture(stream, mode);
}

static CUresult end_capture(CUstream stream, CUgraph *graph) {
  atomic_store(&capturing, false);
  return real->StreamEndCapture(stream, graph);
}

static void *ask_for_progress(void *unused) {
  ocp_device_trim(device);
  return unused;
}

static void a_capture_waits_for_who_asks_its_stream_for_progress(void) {
  ocp_stream *stream;
  CHECK_OK(ocp_capture_stream(capture, &stream, error));
  place where = make_place();
  for (int i = 0; i < WARM; i++)
    run_whole(stream, &where, 7, 2);
  ocp_driver slow = *real;
  slow.StreamQuery = slow_query;
  slow.StreamBeginCapture = begin_capture;
  slow.StreamEndCapture = end_capture;
  device->driver = &slow;
  upload(stream, &where, 1); /* so the stream is not known to be idle, and is queried */
  pthread_t asking;
  CHECK(pthread_create(&asking, NULL, ask_for_progress, NULL) == 0);
  while (!atomic_load(&querying))
    usleep(100);
  run_whole(stream, &where, 7, 2);
  CHECK(ocp_capture_has(capture, 7));
  CHECK(pthread_join(asking, NULL) == 0);
  device->driver = real;
  check_result(stream, &where, 2, 1);
  free_place(&where);
  ocp_stream_release(stream);
}

/* `shared`: a stream for all threads; NULL: each thread has its own. */
static void threads_capture_and_replay(ocp_stream *shared) {
  capture = ocp_capture_create(device, shared, WARM);
  CHECK(capture);
  const long replays = atomic_load(&ocp_counters[OCP_GRAPH_REPLAYS]);
  atomic_store(&done, false);
  failing_runs_leave_no_graph();
  releasing_an_id_or_the_end_of_its_thread_frees_all();
  a_capture_waits_for_who_asks_its_stream_for_progress();
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
