/* Automatic CUDA graphs: the records of an instance as one executable graph, made after some warm Runs.
 *
 * The graph belongs to the instance, so one Run at a time changes and launches it. It is made node by node from the
 * records, a library call as a child graph that a stream captured; addresses that differ from Run to Run reach it as
 * changes of the nodes that hold them. Its slab stays reserved for its life. All its launches are ordered: another
 * stream takes an instance with a graph only when the graph's latest launch comes before its own work. */
#ifndef OCP_RUN_REPLAY_H
#define OCP_RUN_REPLAY_H

#include "run/instance.h"

typedef struct ocp_graph {
  ocp_cluster *cluster;
  CUgraph graph; /* kept: changes name its nodes */
  CUgraphExec exec;
  uint64_t slab, slab_bytes;
  uint64_t stream_id, position;         /* where it was launched last, and the end of that stream then */
  int64_t counts[OCP_RECORD_NUM_KINDS]; /* of its nodes */
  CUgraphNode *nodes;                   /* of the records */
  uint32_t *records;                    /* of the fixups: which record each belongs to */
  uint64_t *bases;                      /* of inputs and outputs, as the executable graph has them */
} ocp_graph;

/* Whether this Run of the instance on the stream is to be a launch of a graph. Counts warm Runs, and the reason where a
 * warm Run cannot be one. */
bool ocp_graph_is_due(const ocp_cluster *cluster, ocp_instance *instance, const ocp_stream *stream);
/* Launches the graph of an instance whose bases of inputs and outputs are set, after making or changing it. *launched
 * tells whether: where it was not (counted by reason) and there is no error, the records have to be enqueued. */
int ocp_graph_run(ocp_cluster *cluster, ocp_instance *instance, ocp_stream *stream, bool *launched, ocp_error *error);
/* Notes where the graph was launched; after ocp_stream_enqueued. */
void ocp_graph_launched(ocp_graph *graph, const ocp_stream *stream);
/* Whether a launch on the stream would be ordered after the one before it. */
bool ocp_graph_may_run_on(const ocp_graph *graph, const ocp_stream *stream);
/* Destroys it and gives its slab back; a launch that has not finished may go on. NULL is ignored. */
void ocp_graph_release(ocp_graph *graph);

#endif
