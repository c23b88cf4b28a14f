/* Executable graphs of the emulated driver (CUgraphExec): copies of graphs whose nodes' parameters can change. */
#include "emulator/calls/graph_exec.h"

#include <stdlib.h>
#include <string.h>

#include "emulator/state.h"
#include "emulator/work/enqueue.h"
#include "emulator/work/graph.h"
#include "emulator/work/replay.h"
#include "emulator/work/stream_list.h"

static void release_body(void *body) { emu_graph_exec_release(body); }

static CUresult instantiate(CUgraph graph, struct CUgraphExec_st **out);

/* Makes the work of a node in an executable graph. The bodies of a conditional node become executable graphs. */
static CUresult instantiate_work(emu_work *work, emu_work **out) {
  void *bodies[EMU_MAX_BODIES] = {NULL};
  CUresult result = CUDA_SUCCESS;
  *out = NULL;
  if (work->type != CU_GRAPH_NODE_TYPE_CONDITIONAL) {
    *out = emu_work_share(work);
    return CUDA_SUCCESS;
  }
  if (atomic_exchange(&work->condition->is_instantiated, true))
    return emu_fail(CUDA_ERROR_INVALID_VALUE,
                    "a graph with conditional nodes cannot have two executable graphs at a time");
  for (uint32_t i = 0; i < work->num_bodies && !result; i++) {
    struct CUgraphExec_st *body = NULL;
    result = instantiate(work->bodies[i], &body);
    bodies[i] = body;
  }
  *out = result ? NULL : emu_conditional_work(work, bodies, release_body);
  if (*out)
    return CUDA_SUCCESS;
  for (uint32_t i = 0; i < work->num_bodies; i++)
    if (bodies[i])
      emu_graph_exec_release(bodies[i]);
  atomic_store(&work->condition->is_instantiated, false);
  return result ? result : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult instantiate(CUgraph graph, struct CUgraphExec_st **out) {
  for (uint32_t i = 0; i < graph->num_conditions; i++)
    if (!atomic_load(&graph->conditions[i]->is_used))
      return emu_fail(CUDA_ERROR_INVALID_VALUE, "no conditional node uses a handle that was created for the graph");
  struct CUgraphExec_st *exec = calloc(1, sizeof *exec + graph->count * sizeof exec->nodes[0]);
  if (!exec)
    return CUDA_ERROR_OUT_OF_MEMORY;
  atomic_store(&exec->references, 1);
  pthread_mutex_init(&exec->lock, NULL);
  pthread_mutex_init(&exec->running, NULL);
  exec->snapshot = emu_snapshot_make(graph->count);
  if (!exec->snapshot) {
    emu_graph_exec_release(exec);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  exec->identity = graph->identity;
  exec->device = graph->device;
  for (; exec->count < graph->count; exec->count++) {
    const struct CUgraphNode_st *node = graph->nodes[exec->count];
    size_t bytes = node->num_before * sizeof *node->before;
    uint32_t *before = malloc(bytes + 1);
    if (!before) {
      emu_graph_exec_release(exec);
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    memcpy(before, node->before, bytes);
    exec->nodes[exec->count].num_before = node->num_before;
    exec->nodes[exec->count].before = before;
    CUresult result = instantiate_work(node->work, &exec->snapshot->works[exec->count]);
    if (result) {
      free(before);
      emu_graph_exec_release(exec);
      return result;
    }
  }
  *out = exec;
  return CUDA_SUCCESS;
}

CUresult emu_graph_instantiate(CUgraphExec *out, CUgraph graph, unsigned long long flags) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (result)
    return result;
  if (!out || !graph || flags)
    return CUDA_ERROR_INVALID_VALUE;
  if (graph->is_body)
    return emu_fail(CUDA_ERROR_INVALID_VALUE, "the graph belongs to a conditional node: instantiate that node's graph");
  struct CUgraphExec_st *exec;
  result = instantiate(graph, &exec);
  if (result)
    return result;
  atomic_fetch_add(&emu.live, 1);
  *out = exec;
  return CUDA_SUCCESS;
}

/* ---- changes of parameters; launches enqueued before a change keep the old parameters ---- */

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
    emu_snapshot *copy = emu_snapshot_make(snapshot->count);
    for (uint32_t i = 0; copy && i < snapshot->count; i++)
      copy->works[i] = emu_work_share(snapshot->works[i]);
    if (!copy) {
      pthread_mutex_unlock(&exec->lock);
      emu_work_release(work);
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    emu_snapshot_release(snapshot);
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

/* Updates a child graph node to the parameters of `child`. Fails unless `child` has operations of the same kinds in the
 * same order. */
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
  stream = emu_stream_of(device, stream);
  emu_replay *replay = emu_replay_make(exec, stream);
  return replay ? emu_enqueue_replay(stream, replay) : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult emu_graph_exec_destroy(CUgraphExec exec) {
  if (!exec)
    return CUDA_ERROR_INVALID_VALUE;
  emu_graph_exec_release(exec);
  atomic_fetch_sub(&emu.live, 1);
  return CUDA_SUCCESS;
}
