/* CUDA graph nodes of plan records: a kernel, memcpy or memset node, or for a library call a child graph that is
 * captured on a separate stream. An await has no node: the next node depends on the upload's node. */
#ifndef OCP_RUN_INSTANCE_GRAPH_NODES_H
#define OCP_RUN_INSTANCE_GRAPH_NODES_H

#include "base/error.h"
#include "device/stream.h"
#include "driver/driver.h"
#include "run/instance/instance_state.h"

/* The nodes that a node depends on: at most two. An element is NULL if there are fewer. */
typedef struct ocp_graph_before {
  CUgraphNode nodes[2];
} ocp_graph_before;
/* Adds the node of a record, which depends on `before`. A library call's algorithm, *used, must live as long as the
 * graph. */
CUresult ocp_graph_node_add(const ocp_instance *instance, uint32_t index, ocp_stream *stream, CUgraph graph,
                            ocp_graph_before before, CUgraphNode *node, struct ocp_prepared **used, ocp_error *error);
/* Adds a WHILE node, which depends on `before` and repeats the nodes that the caller adds to *body while the condition
 * `handle` is set. */
CUresult ocp_graph_loop_add(ocp_device *device, CUgraphConditionalHandle handle, CUgraph graph, ocp_graph_before before,
                            CUgraphNode *node, CUgraph *body);
/* Updates the node of a record in the executable graph to the record's present parameters. */
CUresult ocp_graph_node_change(const ocp_instance *instance, uint32_t index, ocp_stream *stream, CUgraphExec exec,
                               CUgraphNode node, struct ocp_prepared **used);
/* Releases the algorithm of a library call after the graph is destroyed; `used` may be NULL. */
void ocp_graph_node_release(const ocp_variant *variant, uint32_t index, struct ocp_prepared *used);
/* Whether a library call has executed with the stream's library handle, so that it can be captured. True after an
 * error, which the call itself then reports. */
bool ocp_graph_call_is_warm(const ocp_instance *instance, uint32_t index, ocp_stream *stream);

#endif
