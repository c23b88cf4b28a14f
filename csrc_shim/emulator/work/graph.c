/* CUDA graphs (CUgraph) of the emulated driver: nodes with their dependencies, captured or added one by one. */
#include "emulator/work/graph.h"

#include <stdlib.h>
#include <string.h>

#include "driver/activity.h"
#include "emulator/work/execute.h"

/* ---- the work of nodes ---- */

static size_t padded_bytes(const emu_op *op) { return (emu_op_bytes(op) + 15) & ~(size_t)15; }

/* Copies the operations into a node's work; NULL: out of memory. */
static emu_work *make_work(int type, const emu_op *const *ops, uint32_t count) {
  const size_t head = (offsetof(emu_work, ops) + count * sizeof(emu_op *) + 15) & ~(size_t)15;
  size_t bytes = head;
  for (uint32_t i = 0; i < count; i++)
    bytes += padded_bytes(ops[i]);
  emu_work *work = malloc(bytes);
  if (!work)
    return NULL;
  memset(work, 0, head);
  atomic_init(&work->references, 1);
  work->type = type;
  work->count = count;
  char *next = (char *)work + head;
  for (uint32_t i = 0; i < count; i++) {
    memcpy(next, ops[i], emu_op_bytes(ops[i]));
    work->ops[i] = (const emu_op *)(const void *)next;
    next += padded_bytes(ops[i]);
  }
  return work;
}

emu_work *emu_work_share(emu_work *work) {
  atomic_fetch_add_explicit(&work->references, 1, memory_order_relaxed);
  return work;
}

void emu_work_release(emu_work *work) {
  if (!work || atomic_fetch_sub(&work->references, 1) != 1)
    return;
  for (uint32_t i = 0; i < work->num_bodies; i++)
    work->release_body(work->bodies[i]);
  emu_condition_release(work->condition);
  free(work);
}

static CUresult single(int type, const emu_op *op, emu_work **work) {
  *work = make_work(type, &op, 1);
  return *work ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult emu_kernel_work(const CUDA_KERNEL_NODE_PARAMS *params, emu_work **work) {
  const unsigned grid[3] = {params->gridDimX, params->gridDimY, params->gridDimZ};
  const unsigned block[3] = {params->blockDimX, params->blockDimY, params->blockDimZ};
  emu_any_op any;
  CUresult result =
      emu_make_launch(&any.op, params->func, grid, block, params->sharedMemBytes, params->kernelParams, params->extra);
  return result ? result : single(CU_GRAPH_NODE_TYPE_KERNEL, &any.op, work);
}

/* Makes the work of a copy node. Only one-dimensional copies within a device, or from the host to a device, are
 * emulated: the executor (csrc_shim/run) makes no others. */
CUresult emu_memcpy_work(const CUDA_MEMCPY3D *params, emu_work **work) {
  const bool from_host = params->srcMemoryType == CU_MEMORYTYPE_HOST;
  const bool row = (from_host || params->srcMemoryType == CU_MEMORYTYPE_DEVICE) &&
                   params->dstMemoryType == CU_MEMORYTYPE_DEVICE && !params->srcXInBytes && !params->srcY &&
                   !params->srcZ && !params->srcLOD && !params->dstXInBytes && !params->dstY && !params->dstZ &&
                   !params->dstLOD && params->WidthInBytes && params->Height == 1 && params->Depth == 1;
  if (!row)
    return emu_fail(CUDA_ERROR_INVALID_VALUE,
                    "a copy node must copy one row within the device, or from the host to it");
  if (from_host && (!params->srcHost || emu_is_device_address((uint64_t)params->srcHost)))
    return emu_fail(CUDA_ERROR_INVALID_VALUE, "a copy node: the source is not host memory");
  if ((!from_host && !emu_device_range(params->srcDevice, params->WidthInBytes)) ||
      !emu_device_range(params->dstDevice, params->WidthInBytes))
    return emu_fail(CUDA_ERROR_INVALID_VALUE, "a copy node accesses bytes outside of a device allocation");
  const emu_op op = {.kind = EMU_OP_COPY,
                     .source = ocp_activity_source(),
                     .copy = {params->dstDevice, from_host ? (uint64_t)params->srcHost : params->srcDevice,
                              params->WidthInBytes, false, from_host}};
  return single(CU_GRAPH_NODE_TYPE_MEMCPY, &op, work);
}

CUresult emu_memset_work(const CUDA_MEMSET_NODE_PARAMS *params, emu_work **work) {
  if (params->elementSize != 1 || params->height != 1 || params->width == 0 || params->value > UINT8_MAX)
    return emu_fail(CUDA_ERROR_INVALID_VALUE, "a memset node must set one row of bytes");
  if (!emu_device_range(params->dst, params->width))
    return emu_fail(CUDA_ERROR_INVALID_VALUE, "a memset node accesses bytes outside of a device allocation");
  const emu_op op = {.kind = EMU_OP_SET,
                     .source = ocp_activity_source(),
                     .set = {params->dst, params->width, (unsigned char)params->value}};
  return single(CU_GRAPH_NODE_TYPE_MEMSET, &op, work);
}

CUresult emu_child_work(CUgraph child, emu_work **work) {
  uint32_t count = 0;
  for (uint32_t i = 0; i < child->count; i++) {
    if (child->nodes[i]->work->type == CU_GRAPH_NODE_TYPE_CONDITIONAL)
      return emu_fail(CUDA_ERROR_INVALID_VALUE, "a graph with conditional nodes cannot be a child graph");
    count += child->nodes[i]->work->count;
  }
  const emu_op **ops = malloc((count + 1) * sizeof *ops);
  if (!ops)
    return CUDA_ERROR_OUT_OF_MEMORY;
  count = 0;
  for (uint32_t i = 0; i < child->count; i++)
    for (uint32_t k = 0; k < child->nodes[i]->work->count; k++)
      ops[count++] = child->nodes[i]->work->ops[k];
  *work = make_work(CU_GRAPH_NODE_TYPE_GRAPH, ops, count);
  free(ops);
  return *work ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static void free_body(void *body) { emu_graph_free(body); }

/* Makes the work of a conditional node of a graph, with empty bodies. */
static CUresult conditional_work(const emu_device *device, emu_condition *condition, bool repeats, uint32_t num_bodies,
                                 emu_work **work) {
  emu_work *made = make_work(CU_GRAPH_NODE_TYPE_CONDITIONAL, NULL, 0);
  if (!made)
    return CUDA_ERROR_OUT_OF_MEMORY;
  made->repeats = repeats;
  made->release_body = free_body;
  for (; made->num_bodies < num_bodies; made->num_bodies++) {
    CUgraph body = emu_graph_make((emu_device *)device);
    if (!body) {
      emu_work_release(made);
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    body->is_body = true;
    made->bodies[made->num_bodies] = body;
  }
  made->condition = emu_condition_share(condition);
  *work = made;
  return CUDA_SUCCESS;
}

emu_work *emu_conditional_work(const emu_work *in_graph, void *const *bodies, void (*release_body)(void *body)) {
  emu_work *work = make_work(CU_GRAPH_NODE_TYPE_CONDITIONAL, NULL, 0);
  if (!work)
    return NULL;
  work->condition = emu_condition_share(in_graph->condition);
  work->repeats = in_graph->repeats;
  work->release_body = release_body;
  work->num_bodies = in_graph->num_bodies;
  memcpy(work->bodies, bodies, work->num_bodies * sizeof *bodies);
  return work;
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
    emu_work_release(graph->nodes[i]->work);
    free(graph->nodes[i]->before);
    free(graph->nodes[i]);
  }
  for (uint32_t i = 0; i < graph->num_conditions; i++)
    emu_condition_release(graph->conditions[i]);
  free(graph->conditions);
  free(graph->nodes);
  free(graph);
  atomic_fetch_sub(&emu.live, 1);
}

/* Appends a node, which takes ownership of the work. */
static CUgraphNode add_node(CUgraph graph, emu_work *work, CUgraphNode const *before, uint32_t num_before) {
  if (work && graph->count == graph->capacity) {
    uint32_t capacity = graph->capacity ? graph->capacity * 2 : 16;
    struct CUgraphNode_st **nodes = realloc(graph->nodes, capacity * sizeof *nodes);
    if (!nodes) {
      emu_work_release(work);
      return NULL;
    }
    graph->nodes = nodes;
    graph->capacity = capacity;
  }
  CUgraphNode node = calloc(1, sizeof *node);
  uint32_t *indices = malloc((num_before + 1) * sizeof *indices);
  if (!node || !indices || !work) {
    free(node);
    free(indices);
    emu_work_release(work);
    return NULL;
  }
  for (uint32_t i = 0; i < num_before; i++)
    indices[i] = before[i]->index;
  *node = (struct CUgraphNode_st){graph->identity, graph->count, num_before, indices, work};
  return graph->nodes[graph->count++] = node;
}

CUgraphNode emu_graph_add(CUgraph graph, const emu_op *op, CUgraphNode const *before, uint32_t num_before) {
  static const int types[] = {CU_GRAPH_NODE_TYPE_KERNEL, CU_GRAPH_NODE_TYPE_MEMCPY, CU_GRAPH_NODE_TYPE_MEMSET};
  return add_node(graph, make_work(types[op->kind], &op, 1), before, num_before);
}

CUresult emu_graph_check_joined(CUgraph graph, CUgraphNode const *last, uint32_t num_last) {
  bool *reached = calloc(graph->count + 1, sizeof *reached);
  if (!reached)
    return CUDA_ERROR_OUT_OF_MEMORY;
  for (uint32_t i = 0; i < num_last; i++)
    reached[last[i]->index] = true;
  bool all = true;
  for (uint32_t i = graph->count; i-- > 0 && all;) {
    all = reached[i];
    for (uint32_t k = 0; k < graph->nodes[i]->num_before; k++)
      reached[graph->nodes[i]->before[k]] = true;
  }
  free(reached);
  return all ? CUDA_SUCCESS : EMU_ERROR_CAPTURE_UNJOINED;
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
  *type = node->work->type;
  return CUDA_SUCCESS;
}

CUresult emu_graph_destroy(CUgraph graph) {
  if (!graph)
    return CUDA_ERROR_INVALID_VALUE;
  if (graph->is_body)
    return emu_fail(CUDA_ERROR_INVALID_VALUE, "the graph belongs to a conditional node, which destroys it");
  emu_graph_free(graph);
  return CUDA_SUCCESS;
}

/* ---- graphs that the program builds node by node ---- */

CUresult emu_graph_create(CUgraph *graph, unsigned flags) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (result)
    return result;
  if (!graph || flags)
    return CUDA_ERROR_INVALID_VALUE;
  *graph = emu_graph_make(device);
  return *graph ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult check_add(CUgraphNode *node, CUgraph graph, const CUgraphNode *before, size_t num_before,
                          const void *params) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (result)
    return result;
  if (!node || !graph || !params || (num_before && !before))
    return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < num_before; i++)
    if (!before[i] || before[i]->graph != graph->identity)
      return emu_fail(CUDA_ERROR_INVALID_VALUE, "a node depends on a node of another graph");
  return CUDA_SUCCESS;
}

static CUresult added(CUgraphNode *node, CUgraph graph, const CUgraphNode *before, size_t num_before, CUresult result,
                      emu_work *work) {
  if (result)
    return result;
  *node = add_node(graph, work, before, (uint32_t)num_before);
  return *node ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult emu_graph_add_kernel_node(CUgraphNode *node, CUgraph graph, const CUgraphNode *before, size_t num_before,
                                   const CUDA_KERNEL_NODE_PARAMS *params) {
  emu_work *work = NULL;
  CUresult result = check_add(node, graph, before, num_before, params);
  if (!result)
    result = emu_kernel_work(params, &work);
  return added(node, graph, before, num_before, result, work);
}

CUresult emu_graph_add_memcpy_node(CUgraphNode *node, CUgraph graph, const CUgraphNode *before, size_t num_before,
                                   const CUDA_MEMCPY3D *params, CUcontext context) {
  emu_work *work = NULL;
  CUresult result = check_add(node, graph, before, num_before, params);
  if (!result && !context)
    result = CUDA_ERROR_INVALID_CONTEXT;
  if (!result)
    result = emu_memcpy_work(params, &work);
  return added(node, graph, before, num_before, result, work);
}

CUresult emu_graph_add_memset_node(CUgraphNode *node, CUgraph graph, const CUgraphNode *before, size_t num_before,
                                   const CUDA_MEMSET_NODE_PARAMS *params, CUcontext context) {
  emu_work *work = NULL;
  CUresult result = check_add(node, graph, before, num_before, params);
  if (!result && !context)
    result = CUDA_ERROR_INVALID_CONTEXT;
  if (!result)
    result = emu_memset_work(params, &work);
  return added(node, graph, before, num_before, result, work);
}

/* Appends a node with a copy of the child graph. */
CUresult emu_graph_add_child_graph_node(CUgraphNode *node, CUgraph graph, const CUgraphNode *before, size_t num_before,
                                        CUgraph child) {
  emu_work *work = NULL;
  CUresult result = check_add(node, graph, before, num_before, child);
  if (!result)
    result = emu_child_work(child, &work);
  return added(node, graph, before, num_before, result, work);
}

/* ---- conditional nodes ---- */

CUresult emu_graph_conditional_handle_create(CUgraphConditionalHandle *handle, CUgraph graph, CUcontext context,
                                             unsigned initial, unsigned flags) {
  emu_device *device;
  CUresult result = emu_enter(&device);
  if (result)
    return result;
  if (!handle || !graph || flags > CU_GRAPH_COND_ASSIGN_DEFAULT)
    return CUDA_ERROR_INVALID_VALUE;
  if (context && (const emu_device *)context != graph->device)
    return emu_fail(CUDA_ERROR_INVALID_VALUE, "the handle's context is not the graph's");
  emu_condition **grown = realloc(graph->conditions, (graph->num_conditions + 1) * sizeof(emu_condition *));
  if (!grown)
    return CUDA_ERROR_OUT_OF_MEMORY;
  graph->conditions = grown;
  emu_condition *condition = emu_condition_make(graph->identity, initial, flags != 0);
  if (!condition)
    return CUDA_ERROR_OUT_OF_MEMORY;
  graph->conditions[graph->num_conditions++] = condition;
  *handle = condition->handle;
  return CUDA_SUCCESS;
}

/* Checks the parameters of a conditional node, and marks its handle as used. */
static CUresult take_condition(CUgraph graph, const CUDA_CONDITIONAL_NODE_PARAMS *params, emu_condition **condition) {
  const unsigned most = params->type == CU_GRAPH_COND_TYPE_IF ? 2 : 1;
  *condition = NULL;
  if (params->type != CU_GRAPH_COND_TYPE_IF && params->type != CU_GRAPH_COND_TYPE_WHILE)
    return emu_fail(CUDA_ERROR_INVALID_VALUE, "conditional nodes of type %d are not emulated", params->type);
  if (params->size < 1 || params->size > most)
    return emu_fail(CUDA_ERROR_INVALID_VALUE, "a conditional node of this type has 1 to %u bodies, got %u", most,
                    params->size);
  if ((const emu_device *)params->ctx != graph->device)
    return emu_fail(CUDA_ERROR_INVALID_VALUE, "a conditional node has another context than its graph");
  *condition = emu_condition_find(params->handle);
  if (!*condition || (*condition)->graph != graph->identity)
    return emu_fail(CUDA_ERROR_INVALID_VALUE, "the conditional handle was not created for this graph");
  if (atomic_exchange(&(*condition)->is_used, true))
    return emu_fail(CUDA_ERROR_INVALID_VALUE, "another conditional node uses the handle");
  return CUDA_SUCCESS;
}

CUresult emu_graph_add_node(CUgraphNode *node, CUgraph graph, const CUgraphNode *before, const CUgraphEdgeData *edges,
                            size_t num_before, CUgraphNodeParams *params) {
  emu_work *work = NULL;
  emu_condition *condition = NULL;
  CUresult result = check_add(node, graph, before, num_before, params);
  if (!result && (edges || params->type != CU_GRAPH_NODE_TYPE_CONDITIONAL))
    result = emu_fail(CUDA_ERROR_INVALID_VALUE, "cuGraphAddNode adds conditional nodes without edge data only");
  if (!result)
    result = take_condition(graph, &params->conditional.node, &condition);
  if (!result)
    result = conditional_work(graph->device, condition, params->conditional.node.type == CU_GRAPH_COND_TYPE_WHILE,
                              params->conditional.node.size, &work);
  emu_condition_release(condition);
  result = added(node, graph, before, num_before, result, work);
  if (!result)
    params->conditional.node.phGraph_out = (CUgraph *)(void *)work->bodies;
  return result;
}
