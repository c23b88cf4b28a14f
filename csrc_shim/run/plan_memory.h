/* What the intermediate tensors of a cluster take: for reports, not for Runs. */
#ifndef OCP_RUN_PLAN_MEMORY_H
#define OCP_RUN_PLAN_MEMORY_H

#include "run/cluster.h"

/* What the intermediate tensors of the last Run took, over its segments; false when there is none, or it is running. */
typedef struct ocp_plan_memory {
  uint64_t planned;       /* bytes of the slabs */
  uint64_t alive_at_once; /* bytes of the largest set of tensors that had to be there at one time: no plan needs less */
} ocp_plan_memory;
bool ocp_cluster_memory(ocp_cluster *cluster, ocp_plan_memory *memory);

#endif
