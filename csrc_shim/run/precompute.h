/* Weights that are computed once, on the device. */
#ifndef OCP_RUN_PRECOMPUTE_H
#define OCP_RUN_PRECOMPUTE_H

#include "base/error.h"
#include "device/weights.h"
#include "run/cluster.h"

/* Runs a cluster without inputs once, and waits for it. Output i is bytes, and fills results[i]. From then on every
 * stream may read them. */
int ocp_cluster_precompute(ocp_cluster *cluster, ocp_weight *const *results, uint32_t count, ocp_error *error);

#endif
