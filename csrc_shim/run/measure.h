/* Times a cluster for the autotuner, which compares candidate schedules. */
#ifndef OCP_RUN_MEASURE_H
#define OCP_RUN_MEASURE_H

#include "base/error.h"
#include "run/cluster.h"

/* Executes a cluster without inputs and outputs many times: first to warm up, then in batches between two CUDA events.
 * *seconds is the median time of one execution. A batch takes at least a millisecond, well above the resolution of
 * events, or has 64 executions. Slow candidates get fewer batches. */
int ocp_cluster_measure(ocp_cluster *cluster, double *seconds, ocp_error *error);

#endif
