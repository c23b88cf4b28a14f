/* Executable graphs: copies of graphs whose nodes' parameters can change, and their replay. */
#include <stdlib.h>
#include <string.h>

#include "driver/driver.h"
#include "emulator/clock.h"
#include "emulator/driver.h"
#include "emulator/graph.h"
#include "emulator/observe.h"
#include "emulator/state.h"
#include "emulator/stream.h"

/* What all nodes do. A launch that has not run yet keeps the snapshot of the time when it was enqueued: a snapshot
 * changes only while it has a single user. */
typedef struct emu_snapshot {
  atomic_int references;
  uint32_t count;
  emu_work *works[];
} emu_snapshot;

struct CUgraphExec_st {
  atomic_int references; /* replays hold one, too */
  pthread_mutex_t lock;  /* guards the snapshot */
  uint64_t identity;     /* of the graph it was made from */
  emu_device *device;
  pthread_mutex_t running;           /* inline: held while a launch runs */
  uint64_t num_queued, num_finished; /* adversarial: launches; under emu_order */
  emu_snapshot *snapshot;
  uint32_t count;
  struct {
    uint32_t num_before;
    uint32_t *before;
  } nodes[];
};

struct emu_replay {
  emu_context context;
  struct CUgraphExec_st *exec;
  CUresult result;
  uint32_t done;
  uint64_t number;        /* among the queued ones of the executable graph, from 1; 0: not queued */
  emu_snapshot *snapshot; /* as it was at the launch */
  bool ran[];
};

static emu_snapshot *make_snapshot(uint32_t count) {
  emu_snapshot *snapshot = calloc(1, sizeof *snapshot + count * sizeof(emu_work *));
  if (snapshot) {
    atomic_init(&snapshot->references, 1);
    snapshot->count = count;
  }
  return snapshot;
}

static void release_snapshot(emu_snapshot *snapshot) {
  if (!snapshot || atomic_fetch_sub(&snapshot->references, 1) != 1)
    return;
  for (uint32_t i = 0; i < snapshot->count; i++)
    emu_work_release(snapshot->works[i]);
  free(snapshot);
}

static void release_exec(struct CUgraphExec_st *exec) {
  if (atomic_fetch_sub(&exec->references, 1) != 1)
    return;
  release_snapshot(exec->snapshot);
  for (uint32_t i = 0; i < exec->count; i++)
    free(exec->nodes[i].before);
  pthread_mutex_destroy(&exec->lock);
  pthread_mutex_destroy(&exec->running);
  free(exec);
}

CUresult emu_graph_instantiate(CUgraphExec *out, CUgraph graph, unsigned long long flags) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (result)
    return result;
  if (!out || !graph || flags)
    return CUDA_ERROR_INVALID_VALUE;
  struct CUgraphExec_st *exec = calloc(1, sizeof *exec + graph->count * sizeof exec->nodes[0]);
  if (!exec)
    return CUDA_ERROR_OUT_OF_MEMORY;
  atomic_store(&exec->references, 1);
  pthread_mutex_init(&exec->lock, NULL);
  pthread_mutex_init(&exec->running, NULL);
  exec->snapshot = make_snapshot(graph->count);
  if (!exec->snapshot) {
    release_exec(exec);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  exec->identity = graph->identity;
  exec->device = graph->device;
  for (; exec->count < graph->count; exec->count++) {
    const struct CUgraphNode_st *node = graph->nodes[exec->count];
    size_t bytes = node->num_before * sizeof *node->before;
    uint32_t *before = malloc(bytes + 1);
    if (!before) {
      release_exec(exec);
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    memcpy(before, node->before, bytes);
    exec->snapshot->works[exec->count] = emu_work_share(node->work);
    exec->nodes[exec->count].num_before = node->num_before;
    exec->nodes[exec->count].before = before;
  }
  atomic_fetch_add(&emu.live, 1);
  *out = exec;
  return CUDA_SUCCESS;
}

/* ---- changes; launches that are still to run keep their parameters ---- */

static CUresult check_change(CUgraphExec exec, CUgraphNode node, int type, const void *params) {
  static const char *const names[] = {"kernel", "copy", "memset", "host", "child graph"};
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (result)
    return result;
  if (!exec || !node || !params || node->graph != exec->identity || node->work->type != type)
    return emu_fail(CUDA_ERROR_INVALID_VALUE, "the node is not a %s node of the graph that was instantiated",
                    names[type]);
  return CUDA_SUCCESS;
}

static CUresult changed(CUgraphExec exec, CUgraphNode node, CUresult result, emu_work *work) {
  if (result)
    return result;
  pthread_mutex_lock(&exec->lock);
  emu_snapshot *snapshot = exec->snapshot;
  if (atomic_load(&snapshot->references) > 1) {
    emu_snapshot *copy = make_snapshot(snapshot->count);
    for (uint32_t i = 0; copy && i < snapshot->count; i++)
      copy->works[i] = emu_work_share(snapshot->works[i]);
    if (!copy) {
      pthread_mutex_unlock(&exec->lock);
      emu_work_release(work);
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    release_snapshot(snapshot);
    exec->snapshot = snapshot = copy;
  }
  emu_work *before = snapshot->works[node->index];
  snapshot->works[node->index] = work;
  pthread_mutex_unlock(&exec->lock);
  emu_work_release(before);
  return CUDA_SUCCESS;
}

CUresult emu_graph_exec_kernel_node_set_params(CUgraphExec exec, CUgraphNode node,
                                               const CUDA_KERNEL_NODE_PARAMS *params) {
  emu_work *work = NULL;
  CUresult result = check_change(exec, node, CU_GRAPH_NODE_TYPE_KERNEL, params);
  if (!result)
    result = emu_kernel_work(params, &work);
  return changed(exec, node, result, work);
}

CUresult emu_graph_exec_memcpy_node_set_params(CUgraphExec exec, CUgraphNode node, const CUDA_MEMCPY3D *params,
                                               CUcontext context) {
  emu_work *work = NULL;
  CUresult result = check_change(exec, node, CU_GRAPH_NODE_TYPE_MEMCPY, params);
  if (!result && !context)
    result = CUDA_ERROR_INVALID_CONTEXT;
  if (!result)
    result = emu_memcpy_work(params, &work);
  return changed(exec, node, result, work);
}

CUresult emu_graph_exec_memset_node_set_params(CUgraphExec exec, CUgraphNode node,
                                               const CUDA_MEMSET_NODE_PARAMS *params, CUcontext context) {
  emu_work *work = NULL;
  CUresult result = check_change(exec, node, CU_GRAPH_NODE_TYPE_MEMSET, params);
  if (!result && !context)
    result = CUDA_ERROR_INVALID_CONTEXT;
  if (!result)
    result = emu_memset_work(params, &work);
  return changed(exec, node, result, work);
}

/* A child of another shape would need another executable graph. */
CUresult emu_graph_exec_child_graph_node_set_params(CUgraphExec exec, CUgraphNode node, CUgraph child) {
  emu_work *work = NULL;
  CUresult result = check_change(exec, node, CU_GRAPH_NODE_TYPE_GRAPH, child);
  if (!result)
    result = emu_child_work(child, &work);
  bool same = !result && work->count == node->work->count;
  for (uint32_t i = 0; same && i < work->count; i++)
    same = work->ops[i]->kind == node->work->ops[i]->kind;
  if (!result && !same) {
    emu_work_release(work);
    return emu_fail(CUDA_ERROR_INVALID_VALUE, "the child graph has other nodes than the one that was instantiated");
  }
  return changed(exec, node, result, work);
}

/* ---- launches ---- */

CUresult emu_graph_launch(CUgraphExec exec, CUstream stream) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (result)
    return result;
  if (!exec)
    return CUDA_ERROR_INVALID_VALUE;
  emu_replay *replay = calloc(1, sizeof *replay + exec->count * sizeof(bool));
  if (!replay)
    return CUDA_ERROR_OUT_OF_MEMORY;
  replay->exec = exec;
  atomic_fetch_add(&exec->references, 1);
  pthread_mutex_lock(&exec->lock);
  replay->snapshot = exec->snapshot;
  atomic_fetch_add(&replay->snapshot->references, 1);
  pthread_mutex_unlock(&exec->lock);
  replay->context = emu_context_of(emu_stream_of(device, stream));
  replay->context.in_graph = true;
  return emu_enqueue_replay(replay->context.stream, replay);
}

CUresult emu_graph_exec_destroy(CUgraphExec exec) {
  if (!exec)
    return CUDA_ERROR_INVALID_VALUE;
  release_exec(exec);
  atomic_fetch_sub(&emu.live, 1);
  return CUDA_SUCCESS;
}

/* ---- replay ---- */

/* The next node in order, or any whose dependencies have run, picked by random. */
static uint32_t pick(const emu_replay *replay, uint32_t (*random)(uint32_t below)) {
  if (!random)
    return replay->done;
  uint32_t picked = 0, ready = 0;
  for (uint32_t i = 0; i < replay->exec->count; i++) {
    bool free_to_run = !replay->ran[i];
    for (uint32_t k = 0; k < replay->exec->nodes[i].num_before && free_to_run; k++)
      free_to_run = replay->ran[replay->exec->nodes[i].before[k]];
    if (free_to_run && random(++ready) == 0)
      picked = i;
  }
  return picked;
}

bool emu_replay_step(emu_replay *replay, const emu_clock *clock, uint32_t (*random)(uint32_t below)) {
  if (replay->done == replay->exec->count || replay->result)
    return false;
  uint32_t index = pick(replay, random);
  const emu_work *work = replay->snapshot->works[index];
  for (uint32_t i = 0; i < work->count && !replay->result; i++)
    replay->result = emu_run_observed(&replay->context, work->ops[i], clock);
  replay->ran[index] = true;
  replay->done++;
  return true;
}

CUresult emu_replay_run(emu_replay *replay, const emu_clock *clock) {
  replay->context.is_inline = true;
  pthread_mutex_lock(&replay->exec->running);
  while (emu_replay_step(replay, clock, NULL)) {
  }
  pthread_mutex_unlock(&replay->exec->running);
  return replay->result;
}

void emu_replay_queued(emu_replay *replay) { replay->number = ++replay->exec->num_queued; }

bool emu_replay_is_next(const emu_replay *replay) { return replay->number == replay->exec->num_finished + 1; }

CUresult emu_replay_result(const emu_replay *replay) { return replay->result; }

void emu_replay_free(emu_replay *replay) {
  if (replay->number)
    replay->exec->num_finished++;
  release_snapshot(replay->snapshot);
  release_exec(replay->exec);
  free(replay);
}
