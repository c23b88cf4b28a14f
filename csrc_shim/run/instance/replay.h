/* CUDA graphs of plans: the records of an instance as one executable graph, made after some warm Runs and launched by
 * later Runs.
 *
 * The graph belongs to the instance, so one Run at a time changes and launches it. It is made node by node from the
 * records; a library call becomes a child graph, captured on a stream. Before a launch, the Run updates the nodes whose
 * addresses differ from those of the previous launch. The graph keeps its slab as long as it lives. Its launches are
 * ordered: a Run on another stream uses the instance only if its work comes after the graph's latest launch. */
#ifndef OCP_RUN_INSTANCE_REPLAY_H
#define OCP_RUN_INSTANCE_REPLAY_H

#include "base/error.h"
#include "device/device.h"
#include "device/stream.h"
#include "run/instance/instance.h"
#include "run/instance/instance_cache.h"

typedef struct ocp_replay ocp_replay;

/* The limits of a cluster's graphs, and the number and total slab size of its present graphs. */
typedef struct ocp_replay_budget {
  ocp_device *device;
  const char *cluster_name;
  ocp_instance_cache *cache; /* at a limit, its least recently used instance with a graph loses the graph */
  /* Warm Runs before a graph is made, and the maximum number of graphs (0: the cluster gets no graphs). Both may change
   * during Runs. */
  atomic_uint warm_runs, max_replays;
  atomic_uint num_replays;
  atomic_ullong slab_bytes; /* bytes of the slabs of all graphs together */
  atomic_bool said_refusal;
} ocp_replay_budget;

/* Whether this Run of the instance on the stream should launch a graph. Counts warm Runs, and the reason if a warm Run
 * cannot launch a graph. */
bool ocp_replay_is_due(const ocp_replay_budget *budget, ocp_instance *instance, const ocp_stream *stream);
/* Makes or updates the graph of an instance whose bases of inputs and outputs are set, and launches it. *launched
 * tells whether the graph was launched. If it was not, and the call succeeded, the caller enqueues the records. The
 * call has counted the reason, except where a library call must run once with these arguments before a graph can
 * contain it. */
int ocp_replay_run(ocp_replay_budget *budget, ocp_instance *instance, ocp_stream *stream, bool *launched,
                   ocp_error *error);
/* Destroys the graph and frees its slab. An unfinished launch continues. Ignores NULL. */
void ocp_replay_release(ocp_replay *replay);

#endif
