/* Constant folding on the device: computes weights once, when a cluster is created. */
#ifndef OCP_RUN_PRECOMPUTE_H
#define OCP_RUN_PRECOMPUTE_H

#include "base/error.h"
#include "device/memory/weights.h"
#include "run/cluster.h"

/* Runs a cluster without inputs once, and waits for it. Output i, a tensor of bytes, fills results[i], which every
 * stream may read from then on. */
int ocp_cluster_precompute(ocp_cluster *cluster, ocp_weight *const *results, uint32_t count, ocp_error *error);

#endif
