/* Members of the driver table: executable graphs. */
#ifndef OCP_EMULATOR_CALLS_GRAPH_EXEC_H
#define OCP_EMULATOR_CALLS_GRAPH_EXEC_H

#include "driver/driver.h"

CUresult emu_graph_instantiate(CUgraphExec *exec, CUgraph graph, unsigned long long flags);
CUresult emu_graph_exec_kernel_node_set_params(CUgraphExec exec, CUgraphNode node,
                                               const CUDA_KERNEL_NODE_PARAMS *params);
CUresult emu_graph_exec_memcpy_node_set_params(CUgraphExec exec, CUgraphNode node, const CUDA_MEMCPY3D *params,
                                               CUcontext context);
CUresult emu_graph_exec_memset_node_set_params(CUgraphExec exec, CUgraphNode node,
                                               const CUDA_MEMSET_NODE_PARAMS *params, CUcontext context);
CUresult emu_graph_exec_child_graph_node_set_params(CUgraphExec exec, CUgraphNode node, CUgraph child);
CUresult emu_graph_launch(CUgraphExec exec, CUstream stream);
CUresult emu_graph_exec_destroy(CUgraphExec exec);

#endif
