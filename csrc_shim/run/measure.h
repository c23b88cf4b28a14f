/* The time of a cluster's work, for a choice among ways to compute something. */
#ifndef OCP_RUN_MEASURE_H
#define OCP_RUN_MEASURE_H

#include "base/error.h"
#include "run/cluster.h"

/* Runs a cluster without inputs and outputs until it is warm, then in batches between two events, and gives the median
 * time of one Run. A batch is long enough for the events' resolution, and work that takes long is run few times. */
int ocp_cluster_measure(ocp_cluster *cluster, double *seconds, ocp_error *error);

#endif
