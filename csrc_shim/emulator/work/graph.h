/* CUDA graphs (CUgraph) of the emulated driver: nodes with their dependencies. */
#ifndef OCP_EMULATOR_WORK_GRAPH_H
#define OCP_EMULATOR_WORK_GRAPH_H

#include "driver/driver.h"
#include "emulator/op.h"
#include "emulator/state.h"
#include "emulator/work/conditional.h"

enum { EMU_MAX_BODIES = 2 }; /* IF with an else-branch */

/* The work of a graph node: one operation; for a child graph all its operations in order; for a conditional node its
 * bodies. Immutable, apart from the bodies of a conditional node in a CUgraph. Graphs, executable graphs and unfinished
 * launches share it. */
typedef struct emu_work {
  atomic_int references;
  int type; /* type of the node: CU_GRAPH_NODE_TYPE_... */
  /* Conditional nodes: their bodies are CUgraph in a graph, and CUgraphExec in an executable graph. */
  emu_condition *condition;
  bool repeats; /* WHILE, else IF */
  uint32_t num_bodies;
  void *bodies[EMU_MAX_BODIES];
  void (*release_body)(void *body);
  uint32_t count;
  const emu_op *ops[];
} emu_work;
emu_work *emu_work_share(emu_work *work);
void emu_work_release(emu_work *work);

struct CUgraphNode_st {
  uint64_t graph; /* unique number of the node's graph */
  uint32_t index, num_before;
  uint32_t *before;
  emu_work *work;
};

struct CUgraph_st {
  uint64_t identity;
  emu_device *device;
  bool is_body; /* owned by a conditional node */
  uint32_t count, capacity;
  struct CUgraphNode_st **nodes; /* in the order of creation: a node depends on earlier nodes only */
  uint32_t num_conditions;
  emu_condition **conditions; /* made for this graph */
};

CUgraph emu_graph_make(emu_device *device); /* NULL: out of memory */
void emu_graph_free(CUgraph graph);
/* Appends a node that holds a copy of the operation and depends on the nodes `before`; NULL: out of memory. */
CUgraphNode emu_graph_add(CUgraph graph, const emu_op *op, CUgraphNode const *before, uint32_t num_before);
/* Fails with CUDA_ERROR_STREAM_CAPTURE_UNJOINED unless every node of the captured graph is in `last` or precedes a node
 * in `last`, the nodes on which the next node of the capture's first stream would depend. */
CUresult emu_graph_check_joined(CUgraph graph, CUgraphNode const *last, uint32_t num_last);

/* Check the parameters as a launch, copy or memset on a stream does, and make a node's work from them. */
CUresult emu_kernel_work(const CUDA_KERNEL_NODE_PARAMS *params, emu_work **work);
CUresult emu_memcpy_work(const CUDA_MEMCPY3D *params, emu_work **work);
CUresult emu_memset_work(const CUDA_MEMSET_NODE_PARAMS *params, emu_work **work);
CUresult emu_child_work(CUgraph child, emu_work **work);
/* Makes the work of a conditional node of an executable graph from the work of the same node in the CUgraph. `bodies`
 * are executable graphs, which the new work owns. NULL: out of memory. */
emu_work *emu_conditional_work(const emu_work *in_graph, void *const *bodies, void (*release_body)(void *body));

/* Members of the driver table. */
CUresult emu_graph_create(CUgraph *graph, unsigned flags);
CUresult emu_graph_add_kernel_node(CUgraphNode *node, CUgraph graph, const CUgraphNode *before, size_t num_before,
                                   const CUDA_KERNEL_NODE_PARAMS *params);
CUresult emu_graph_add_memcpy_node(CUgraphNode *node, CUgraph graph, const CUgraphNode *before, size_t num_before,
                                   const CUDA_MEMCPY3D *params, CUcontext context);
CUresult emu_graph_add_memset_node(CUgraphNode *node, CUgraph graph, const CUgraphNode *before, size_t num_before,
                                   const CUDA_MEMSET_NODE_PARAMS *params, CUcontext context);
CUresult emu_graph_add_child_graph_node(CUgraphNode *node, CUgraph graph, const CUgraphNode *before, size_t num_before,
                                        CUgraph child);
CUresult emu_graph_conditional_handle_create(CUgraphConditionalHandle *handle, CUgraph graph, CUcontext context,
                                             unsigned initial, unsigned flags);
CUresult emu_graph_add_node(CUgraphNode *node, CUgraph graph, const CUgraphNode *before, const CUgraphEdgeData *edges,
                            size_t num_before, CUgraphNodeParams *params);
CUresult emu_graph_get_nodes(CUgraph graph, CUgraphNode *nodes, size_t *count);
CUresult emu_graph_node_get_type(CUgraphNode node, int *type);
CUresult emu_graph_destroy(CUgraph graph);

#endif
