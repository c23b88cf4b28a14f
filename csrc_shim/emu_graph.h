/* Graphs: what emu_capture.c, which makes them, needs of emu_graph.c. */
#ifndef OCP_EMU_GRAPH_H
#define OCP_EMU_GRAPH_H

#include "emu_stream.h"

CUgraph emu_graph_make(emu_device *device); /* NULL: out of memory */
void emu_graph_free(CUgraph graph);
/* Appends a copy of the operation as a node that depends on `before`; NULL: out of memory. */
CUgraphNode emu_graph_add(CUgraph graph, const emu_op *op, CUgraphNode const *before, uint32_t num_before);
/* Whether every node is one of these or comes before one. */
bool emu_graph_all_before(CUgraph graph, CUgraphNode const *last, uint32_t num_last);

#endif
