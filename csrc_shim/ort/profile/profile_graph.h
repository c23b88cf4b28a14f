/* Attributes the kernels of CUDA graphs to their nodes: a CUPTI record names the graph launch, not the node. */
#ifndef OCP_ORT_PROFILE_PROFILE_GRAPH_H
#define OCP_ORT_PROFILE_PROFILE_GRAPH_H

#include <stddef.h>

#include "driver/activity.h"

/* Sets the source of each activity of a graph launch (`layout` is nonzero). A layout is the list of the sources of a
 * graph's nodes in the order in which they run (driver/tracer.h). A library call enqueues any number of kernels: it
 * gets all activities before the one that matches the next launch, copy or memset. */
void ocp_profile_resolve_graphs(ocp_activity *activities, size_t count);

#endif
