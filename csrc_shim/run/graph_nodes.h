/* The node of a CUDA graph that does what a record of an instance does: a launch, a copy, a memset, or what a library
 * enqueues for its call, captured on a stream of its own. */
#ifndef OCP_RUN_GRAPH_NODES_H
#define OCP_RUN_GRAPH_NODES_H

#include "base/error.h"
#include "device/stream.h"
#include "driver/driver.h"
#include "run/instance_state.h"

/* Adds the node of a record behind `before`, unless that is NULL. *used is what a library call needs as long as the
 * graph lives. */
CUresult ocp_graph_node_add(const ocp_instance *instance, uint32_t index, ocp_stream *stream, CUgraph graph,
                            CUgraphNode before, CUgraphNode *node, struct ocp_prepared **used, ocp_error *error);
/* Brings the node of a record up to date with its parameters. */
CUresult ocp_graph_node_change(const ocp_instance *instance, uint32_t index, ocp_stream *stream, CUgraphExec exec,
                               CUgraphNode node, struct ocp_prepared **used);
/* After the graph; `used` may be NULL. */
void ocp_graph_node_release(const ocp_variant *variant, uint32_t index, struct ocp_prepared *used);
/* Whether a library call has executed with the stream's handle, so that it can be captured. An error is left to the
 * call itself. */
bool ocp_graph_call_is_warm(const ocp_instance *instance, uint32_t index, ocp_stream *stream);

#endif
