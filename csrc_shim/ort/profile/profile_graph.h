/* Attributes the kernels of CUDA graphs to their nodes: a CUPTI record names the graph launch, not the node. */
#ifndef OCP_ORT_PROFILE_PROFILE_GRAPH_H
#define OCP_ORT_PROFILE_PROFILE_GRAPH_H

#include <stddef.h>

#include "driver/activity.h"

/* Finds the sources of activities that have a layout. The nodes of a launch run in the layout's order. A library call
 * enqueues any number of kernels for one source: all until an activity matches the next source of another kind. */
void ocp_profile_resolve_graphs(ocp_activity *activities, size_t count);

#endif
