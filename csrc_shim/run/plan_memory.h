/* Slab statistics of a cluster, for reports. */
#ifndef OCP_RUN_PLAN_MEMORY_H
#define OCP_RUN_PLAN_MEMORY_H

#include "run/cluster.h"

/* Memory use of the intermediate tensors in the cluster's last Run. ocp_cluster_memory returns false if there was no
 * Run, or if a Run is in progress. */
typedef struct ocp_plan_memory {
  uint64_t planned;       /* total size of the slabs of all segments, in bytes */
  uint64_t alive_at_once; /* sum over the segments of the peak bytes of live tensors: a lower bound for any packing */
} ocp_plan_memory;
bool ocp_cluster_memory(ocp_cluster *cluster, ocp_plan_memory *memory);

#endif
