/* Tests of automatic CUDA graphs: counts the driver calls of each Run, by a driver table that counts and can refuse
 * calls.
 *
 * Arguments: IMAGE PLAN STREAMS SEED (affine_cluster.h) ROUNDS. */
#include <pthread.h>

#include "affine_cluster.h"
#include "base/counters.h"

enum { NUM_THREADS = 4, WARM = 2 };

static ocp_driver counting;

/* ---- the counting driver table ---- */

static atomic_int enqueued, launched, changed, made, waited, allocated, entered;
static atomic_bool refuse_changes;
static _Atomic CUresult refuse_graphs, refuse_launches; /* the errors with which to refuse; CUDA_SUCCESS: do not */

static CUresult launch_kernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                              unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void **params,
                              void **extra) {
  atomic_fetch_add(&enqueued, 1);
  return real->LaunchKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream, params,
                            extra);
}
static CUresult graph_launch(CUgraphExec exec, CUstream stream) {
  atomic_fetch_add(&launched, 1);
  return refuse_launches ? refuse_launches : real->GraphLaunch(exec, stream);
}
static CUresult set_kernel_params(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *params) {
  atomic_fetch_add(&changed, 1);
  return refuse_changes ? CUDA_ERROR_INVALID_VALUE : real->GraphExecKernelNodeSetParams(exec, node, params);
}
static CUresult instantiate(CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
  atomic_fetch_add(&made, 1);
  return refuse_graphs ? refuse_graphs : real->GraphInstantiate(exec, graph, flags);
}
static CUresult synchronize(CUstream stream) {
  atomic_fetch_add(&waited, 1);
  return real->StreamSynchronize(stream);
}
static CUresult query(CUstream stream) {
  atomic_fetch_add(&waited, 1);
  return real->StreamQuery(stream);
}
static CUresult mem_alloc(CUdeviceptr *address, size_t bytes) {
  atomic_fetch_add(&allocated, 1);
  return real->MemAlloc(address, bytes);
}
static CUresult get_current(CUcontext *context) {
  atomic_fetch_add(&entered, 1);
  return real->CtxGetCurrent(context);
}

/* Returns the number of driver calls since the last call of this function, without queries of the current context. */
static int calls(void) {
  return atomic_exchange(&enqueued, 0) + atomic_exchange(&launched, 0) + atomic_exchange(&changed, 0) +
         atomic_exchange(&made, 0) + atomic_exchange(&waited, 0) + atomic_exchange(&allocated, 0);
}

/* ---- tests ---- */

static void one_call_for_each_steady_run(ocp_stream *stream) {
  place one = make_place(), two = make_place();
  upload(stream, &one, 1);
  upload(stream, &two, 2);
  for (int i = 0; i < WARM + 1; i++)
    run(stream, &one, 4);
  calls();
  for (int i = 0; i < 10; i++) {
    run(stream, &one, 4);
    CHECK(atomic_load(&launched) == 1);
    CHECK(calls() == 1);
  }
  check_result(stream, &one, 4, 1);
  calls();
  run(stream, &two, 4); /* updates two nodes: the first reads the input, the second writes the output */
  CHECK(atomic_load(&changed) == 2 && atomic_load(&launched) == 1);
  CHECK(calls() == 3);
  place mixed = {one.input, two.output};
  run(stream, &mixed, 4);
  CHECK(atomic_load(&changed) == 1 && atomic_load(&launched) == 1);
  CHECK(calls() == 2);
  check_result(stream, &mixed, 4, 1);
  free_place(&one);
  free_place(&two);
}

static void a_change_that_is_refused_makes_the_graph_anew(ocp_stream *stream) {
  place one = make_place(), two = make_place();
  upload(stream, &two, 7);
  for (int i = 0; i < WARM + 1; i++)
    run(stream, &one, 4);
  refuse_changes = true;
  calls();
  run(stream, &two, 4);
  CHECK(atomic_load(&made) == 1 && atomic_load(&launched) == 1 && atomic_load(&enqueued) == 0);
  calls();
  for (int i = 0; i < 60; i++) /* updates continue to be refused */
    run(stream, i % 2 ? &two : &one, 4);
  CHECK(atomic_load(&made) <= 4);
  refuse_changes = false;
  check_result(stream, &two, 4, 7);
  free_place(&one);
  free_place(&two);
}

static void a_graph_that_is_refused_is_counted_and_not_tried_again(ocp_stream *stream) {
  place where = make_place();
  const int64_t before = atomic_load(&ocp_counters[OCP_GRAPH_FALLBACKS_DRIVER]);
  upload(stream, &where, 3);
  refuse_graphs = CUDA_ERROR_INVALID_VALUE;
  for (int i = 0; i < WARM; i++)
    run(stream, &where, 2);
  calls();
  for (int i = 0; i < 3; i++)
    run(stream, &where, 2);
  CHECK(atomic_load(&made) == 1 && atomic_load(&launched) == 0 && atomic_load(&enqueued) == 6);
  CHECK(atomic_load(&ocp_counters[OCP_GRAPH_FALLBACKS_DRIVER]) == before + 3);
  refuse_graphs = CUDA_SUCCESS;
  check_result(stream, &where, 2, 3);
  free_place(&where);
}

/* If the driver has no memory for a graph or for its launch, the Run continues without a graph; later Runs try
 * again. */
static void a_graph_without_memory_is_tried_again_later(ocp_stream *stream) {
  place where = make_place();
  const int64_t before = atomic_load(&ocp_counters[OCP_GRAPH_FALLBACKS_MEMORY]);
  upload(stream, &where, 4);
  for (int i = 0; i < WARM; i++)
    run(stream, &where, 5);
  for (int attempt = 1; attempt <= 2; attempt++) {
    *(attempt == 1 ? &refuse_graphs : &refuse_launches) = CUDA_ERROR_OUT_OF_MEMORY;
    calls();
    run(stream, &where, 5);
    CHECK(atomic_load(&made) == 1 && atomic_load(&enqueued) == 2);
    CHECK(atomic_load(&ocp_counters[OCP_GRAPH_FALLBACKS_MEMORY]) == before + attempt);
    refuse_graphs = refuse_launches = CUDA_SUCCESS;
    calls();
    for (int i = 0; i < WARM << attempt; i++)
      run(stream, &where, 5);
    CHECK(atomic_load(&made) == 0 && atomic_load(&launched) == 0);
  }
  run(stream, &where, 5);
  CHECK(atomic_load(&made) == 1 && atomic_load(&launched) == 1);
  check_result(stream, &where, 5, 4);
  free_place(&where);
}

static void a_stream_that_somebody_captures_gets_the_records(ocp_stream *stream) {
  place where = make_place();
  upload(stream, &where, 5);
  for (int i = 0; i < WARM + 1; i++)
    run(stream, &where, 3);
  const int64_t before = atomic_load(&ocp_counters[OCP_GRAPH_FALLBACKS_CAPTURING]);
  atomic_store(&stream->capturing, true);
  calls();
  run(stream, &where, 3);
  CHECK(atomic_load(&enqueued) == 2 && atomic_load(&launched) == 0);
  CHECK(atomic_load(&ocp_counters[OCP_GRAPH_FALLBACKS_CAPTURING]) == before + 1);
  atomic_store(&stream->capturing, false);
  check_result(stream, &where, 3, 5);
  place other = make_place();
  upload(stream, &other, 6);
  run(stream, &other, 3); /* the instance's parameters still have the slab of the captured Run */
  run(stream, &other, 3);
  check_result(stream, &other, 3, 6);
  free_place(&where);
  free_place(&other);
}

static int64_t counter(ocp_counter which) { return atomic_load(&ocp_counters[which]); }

static void capture(ocp_stream *stream, place *where, int64_t rows) {
  const int64_t captures = counter(OCP_GRAPH_CAPTURES);
  for (int i = 0; i < 2000 && counter(OCP_GRAPH_CAPTURES) == captures; i++)
    run(stream, where, rows); /* each loss of its graph raises the number of warm Runs of an instance */
  CHECK(counter(OCP_GRAPH_CAPTURES) == captures + 1);
}

/* Each graph has a slab of 256 bytes. Slabs may take a quarter of the device's memory, which the test makes small. */
static void graphs_keep_a_share_of_the_memory(ocp_stream *stream) {
  const size_t total_bytes = device->total_bytes;
  place where = make_place();
  upload(stream, &where, 8);
  static const struct {
    size_t share;
    int64_t graphs;
  } cases[] = {{512, 2}, {256, 1}, {1, 1}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    ocp_cluster_release_graphs(cluster);
    const int64_t before = counter(OCP_DEVICE_BYTES_IN_USE);
    device->total_bytes = 4 * cases[i].share;
    capture(stream, &where, 1);
    capture(stream, &where, 3);
    capture(stream, &where, 4);
    CHECK(counter(OCP_GRAPHS_LIVE) == cases[i].graphs);
    CHECK(counter(OCP_DEVICE_BYTES_IN_USE) == before + 256 * cases[i].graphs);
    check_result(stream, &where, 4, 8);
  }
  device->total_bytes = total_bytes;
  free_place(&where);
}

static long rounds;

static void *run_shapes(void *argument) {
  const int seed = *(const int *)argument;
  ocp_stream *stream;
  CHECK_OK(ocp_stream_create(device, &stream, error));
  place places[2] = {make_place(), make_place()};
  for (long round = 0; round < rounds; round++) {
    place *where = &places[(round / 3 + seed) % 2];
    const int64_t rows = 1 + (round / 2 * 7 + seed) % 3;
    const float first = (float)(seed * 1000 + round % 100);
    upload(stream, where, first);
    run(stream, where, rows);
    if (round % 4 == seed)
      run(stream, where, rows);
    check_result(stream, where, rows, first);
    if (round % 50 == 49)
      ocp_cluster_release_graphs(
          cluster); /* releases graphs like an allocation that runs out of memory, while others run */
  }
  free_place(&places[0]);
  free_place(&places[1]);
  ocp_stream_release(stream);
  return NULL;
}

int main(int argc, char **argv) {
  CHECK(argc == 6);
  make_affine_cluster(argv + 1);
  rounds = strtol(argv[5], NULL, 10);
  counting = *real;
  counting.LaunchKernel = launch_kernel;
  counting.GraphLaunch = graph_launch;
  counting.GraphExecKernelNodeSetParams = set_kernel_params;
  counting.GraphInstantiate = instantiate;
  counting.StreamSynchronize = synchronize;
  counting.StreamQuery = query;
  counting.MemAlloc = mem_alloc;
  counting.CtxGetCurrent = get_current;
  device->driver = &counting;
  ocp_cluster_set_graphs(cluster, WARM, 5);
  ocp_stream *stream;
  CHECK_OK(ocp_stream_create(device, &stream, error));
  one_call_for_each_steady_run(stream);
  a_change_that_is_refused_makes_the_graph_anew(stream);
  a_graph_that_is_refused_is_counted_and_not_tried_again(stream);
  a_graph_without_memory_is_tried_again_later(stream);
  a_stream_that_somebody_captures_gets_the_records(stream);
  graphs_keep_a_share_of_the_memory(stream);
  CHECK(atomic_load(&entered) > 0);
  pthread_t threads[NUM_THREADS];
  int seeds[NUM_THREADS];
  for (int i = 0; i < NUM_THREADS; i++) {
    seeds[i] = i;
    CHECK(pthread_create(&threads[i], NULL, run_shapes, &seeds[i]) == 0);
  }
  for (int i = 0; i < NUM_THREADS; i++)
    CHECK(pthread_join(threads[i], NULL) == 0);
  CHECK(atomic_load(&ocp_counters[OCP_GRAPH_REPLAYS]) > 0);
  ocp_stream_release(stream);
  release_affine_cluster();
  puts("graph_test passed");
  return 0;
}
