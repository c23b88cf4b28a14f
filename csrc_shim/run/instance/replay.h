/* CUDA graphs of plans: the records of an instance as one executable graph, made after some warm Runs and replayed by
 * later ones.
 *
 * The graph belongs to the instance, so one Run at a time changes and launches it. It is made node by node from the
 * records, a library call as a child graph that a stream captured; addresses that differ from Run to Run reach it as
 * changes of the nodes that hold them. Its slab stays reserved for its life. All its launches are ordered: another
 * stream takes an instance with a graph only when the graph's latest launch comes before its own work. */
#ifndef OCP_RUN_INSTANCE_REPLAY_H
#define OCP_RUN_INSTANCE_REPLAY_H

#include "base/error.h"
#include "device/device.h"
#include "device/stream.h"
#include "run/instance/instance.h"
#include "run/instance/instance_cache.h"

typedef struct ocp_replay ocp_replay;

/* The limits of a cluster's graphs, and their present use. */
typedef struct ocp_replay_budget {
  ocp_device *device;
  const char *cluster_name;
  ocp_instance_cache *cache; /* new graphs replace the oldest ones of its instances */
  /* Warm Runs before a graph is made, and the maximum number of graphs; 0: none. Both may change during Runs. */
  atomic_uint warm_runs, max_replays;
  atomic_uint num_replays;
  atomic_ullong slab_bytes; /* of all graphs together */
  atomic_bool said_refusal;
} ocp_replay_budget;

/* Whether this Run of the instance on the stream should launch a graph. Counts warm Runs. If a warm Run cannot
 * launch one, counts the reason. */
bool ocp_replay_is_due(const ocp_replay_budget *budget, ocp_instance *instance, const ocp_stream *stream);
/* Launches the graph of an instance whose bases of inputs and outputs are set, after making or changing it. *launched
 * says whether the graph was launched. If it was not (counted by reason) and there was no error, the caller enqueues
 * the records. */
int ocp_replay_run(ocp_replay_budget *budget, ocp_instance *instance, ocp_stream *stream, bool *launched,
                   ocp_error *error);
/* Destroys the graph and frees its slab. An unfinished launch continues. Ignores NULL. */
void ocp_replay_release(ocp_replay *replay);

#endif
