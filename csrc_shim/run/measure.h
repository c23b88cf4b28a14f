/* Times a cluster for the autotuner, which compares candidate schedules. */
#ifndef OCP_RUN_MEASURE_H
#define OCP_RUN_MEASURE_H

#include "base/error.h"
#include "run/cluster.h"

/* Runs a cluster without inputs and outputs: first some warm-up Runs, then batches between two CUDA events. *seconds is
 * the median time of one Run. A batch takes at least a millisecond, above the resolution of events, or has 64 Runs.
 * Slow candidates get fewer batches. */
int ocp_cluster_measure(ocp_cluster *cluster, double *seconds, ocp_error *error);

#endif
