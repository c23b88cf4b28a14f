/* Graphs: nodes with their dependencies, executable copies whose kernel parameters can change, and their replay. */
#include "emu_graph.h"

#include <stdlib.h>
#include <string.h>

/* An operation that never changes; shared by graphs, executable graphs and launches that are still to run. */
typedef struct emu_call {
  atomic_int references;
  emu_op op; /* as long as it needs */
} emu_call;

struct CUgraphNode_st {
  uint64_t graph; /* its identity */
  uint32_t index, num_before;
  uint32_t *before;
  emu_call *call;
};

struct CUgraph_st {
  uint64_t identity;
  emu_device *device;
  uint32_t count, capacity;
  struct CUgraphNode_st **nodes; /* in the order of capture, which dependencies follow */
};

struct CUgraphExec_st {
  atomic_int references; /* replays hold one, too */
  pthread_mutex_t lock;
  uint64_t identity; /* of the graph it was made from */
  emu_device *device;
  uint32_t count;
  struct {
    emu_call *call;
    uint32_t num_before;
    uint32_t *before;
  } nodes[];
};

struct emu_replay {
  struct CUgraphExec_st *exec;
  CUresult result;
  uint32_t done;
  bool *ran;         /* after calls */
  emu_call *calls[]; /* as they were at the launch */
};

/* ---- calls ---- */

static emu_call *make_call(const emu_op *op) {
  emu_call *call = malloc(offsetof(emu_call, op) + sizeof(emu_op));
  if (!call)
    return NULL;
  atomic_init(&call->references, 1);
  memcpy(&call->op, op, emu_op_bytes(op));
  return call;
}

static emu_call *share_call(emu_call *call) {
  atomic_fetch_add_explicit(&call->references, 1, memory_order_relaxed);
  return call;
}

static void release_call(emu_call *call) {
  if (call && atomic_fetch_sub(&call->references, 1) == 1)
    free(call);
}

/* ---- graphs ---- */

CUgraph emu_graph_make(emu_device *device) {
  static _Atomic uint64_t identities;
  CUgraph graph = calloc(1, sizeof *graph);
  if (!graph)
    return NULL;
  graph->identity = atomic_fetch_add(&identities, 1) + 1;
  graph->device = device;
  atomic_fetch_add(&emu.live, 1);
  return graph;
}

void emu_graph_free(CUgraph graph) {
  if (!graph)
    return;
  for (uint32_t i = 0; i < graph->count; i++) {
    release_call(graph->nodes[i]->call);
    free(graph->nodes[i]->before);
    free(graph->nodes[i]);
  }
  free(graph->nodes);
  free(graph);
  atomic_fetch_sub(&emu.live, 1);
}

CUgraphNode emu_graph_add(CUgraph graph, const emu_op *op, CUgraphNode const *before, uint32_t num_before) {
  if (graph->count == graph->capacity) {
    uint32_t capacity = graph->capacity ? graph->capacity * 2 : 16;
    struct CUgraphNode_st **nodes = realloc(graph->nodes, capacity * sizeof *nodes);
    if (!nodes)
      return NULL;
    graph->nodes = nodes;
    graph->capacity = capacity;
  }
  CUgraphNode node = calloc(1, sizeof *node);
  uint32_t *indices = malloc((num_before + 1) * sizeof *indices);
  emu_call *call = make_call(op);
  if (!node || !indices || !call) {
    free(node);
    free(indices);
    release_call(call);
    return NULL;
  }
  for (uint32_t i = 0; i < num_before; i++)
    indices[i] = before[i]->index;
  *node = (struct CUgraphNode_st){graph->identity, graph->count, num_before, indices, call};
  return graph->nodes[graph->count++] = node;
}

bool emu_graph_all_before(CUgraph graph, CUgraphNode const *last, uint32_t num_last) {
  bool *reached = calloc(graph->count + 1, sizeof *reached);
  if (!reached)
    return false;
  for (uint32_t i = 0; i < num_last; i++)
    reached[last[i]->index] = true;
  bool all = true;
  for (uint32_t i = graph->count; i-- > 0 && all;) {
    all = reached[i];
    for (uint32_t k = 0; k < graph->nodes[i]->num_before; k++)
      reached[graph->nodes[i]->before[k]] = true;
  }
  free(reached);
  return all;
}

CUresult emu_graph_get_nodes(CUgraph graph, CUgraphNode *nodes, size_t *count) {
  if (!graph || !count)
    return CUDA_ERROR_INVALID_VALUE;
  if (nodes)
    for (size_t i = 0; i < *count && i < graph->count; i++)
      nodes[i] = graph->nodes[i];
  if (!nodes || *count > graph->count)
    *count = graph->count;
  return CUDA_SUCCESS;
}

CUresult emu_graph_node_get_type(CUgraphNode node, int *type) {
  if (!node || !type)
    return CUDA_ERROR_INVALID_VALUE;
  static const int types[] = {CU_GRAPH_NODE_TYPE_KERNEL, CU_GRAPH_NODE_TYPE_MEMCPY, CU_GRAPH_NODE_TYPE_MEMSET};
  *type = types[node->call->op.kind];
  return CUDA_SUCCESS;
}

CUresult emu_graph_destroy(CUgraph graph) {
  if (!graph)
    return CUDA_ERROR_INVALID_VALUE;
  emu_graph_free(graph);
  return CUDA_SUCCESS;
}

/* ---- executable graphs ---- */

static void release_exec(struct CUgraphExec_st *exec) {
  if (atomic_fetch_sub(&exec->references, 1) != 1)
    return;
  for (uint32_t i = 0; i < exec->count; i++) {
    release_call(exec->nodes[i].call);
    free(exec->nodes[i].before);
  }
  pthread_mutex_destroy(&exec->lock);
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
    exec->nodes[exec->count].call = share_call(node->call);
    exec->nodes[exec->count].num_before = node->num_before;
    exec->nodes[exec->count].before = before;
  }
  atomic_fetch_add(&emu.live, 1);
  *out = exec;
  return CUDA_SUCCESS;
}

/* Launches that are still to run keep their parameters. */
CUresult emu_graph_exec_kernel_node_set_params(CUgraphExec exec, CUgraphNode node,
                                               const CUDA_KERNEL_NODE_PARAMS *params) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (result)
    return result;
  if (!exec || !node || !params || node->graph != exec->identity || node->call->op.kind != EMU_OP_KERNEL)
    return emu_fail(CUDA_ERROR_INVALID_VALUE, "the node is no kernel node of the graph that was instantiated");
  const unsigned grid[3] = {params->gridDimX, params->gridDimY, params->gridDimZ};
  const unsigned block[3] = {params->blockDimX, params->blockDimY, params->blockDimZ};
  emu_op op;
  result = emu_make_launch(&op, params->func, grid, block, params->sharedMemBytes, params->kernelParams, params->extra);
  if (result)
    return result;
  emu_call *call = make_call(&op);
  if (!call)
    return CUDA_ERROR_OUT_OF_MEMORY;
  pthread_mutex_lock(&exec->lock);
  emu_call *before = exec->nodes[node->index].call;
  exec->nodes[node->index].call = call;
  pthread_mutex_unlock(&exec->lock);
  release_call(before);
  return CUDA_SUCCESS;
}

CUresult emu_graph_launch(CUgraphExec exec, CUstream stream) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (result)
    return result;
  if (!exec)
    return CUDA_ERROR_INVALID_VALUE;
  size_t bytes = sizeof(emu_replay) + exec->count * (sizeof(emu_call *) + sizeof(bool));
  emu_replay *replay = calloc(1, bytes);
  if (!replay)
    return CUDA_ERROR_OUT_OF_MEMORY;
  replay->ran = (bool *)&replay->calls[exec->count];
  replay->exec = exec;
  atomic_fetch_add(&exec->references, 1);
  pthread_mutex_lock(&exec->lock);
  for (uint32_t i = 0; i < exec->count; i++)
    replay->calls[i] = share_call(exec->nodes[i].call);
  pthread_mutex_unlock(&exec->lock);
  return emu_enqueue_replay(stream ? stream : &device->legacy, replay);
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

bool emu_replay_step(emu_replay *replay, emu_device *device, const emu_clock *clock,
                     uint32_t (*random)(uint32_t below)) {
  if (replay->done == replay->exec->count || replay->result)
    return false;
  uint32_t index = pick(replay, random);
  replay->result = emu_run(device, &replay->calls[index]->op, clock);
  replay->ran[index] = true;
  replay->done++;
  return true;
}

CUresult emu_replay_result(const emu_replay *replay) { return replay->result; }

void emu_replay_free(emu_replay *replay) {
  for (uint32_t i = 0; i < replay->exec->count; i++)
    release_call(replay->calls[i]);
  release_exec(replay->exec);
  free(replay);
}
