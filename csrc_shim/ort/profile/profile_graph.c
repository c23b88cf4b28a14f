#include "ort/profile/profile_graph.h"

#include <stdlib.h>
#include <string.h>

#include "driver/tracer.h"
#include "run/instance/sources.h"

static int by_launch(const void *a, const void *b) {
  const ocp_activity *x = a, *y = b;
  if (x->launch != y->launch)
    return (x->launch > y->launch) - (x->launch < y->launch);
  return (x->begin > y->begin) - (x->begin < y->begin);
}

/* Returns whether the activity is the one that source `number` has enqueued. Always false for a source that is not a
 * kernel of the plugin, a copy or a memset: only these enqueue exactly one activity. */
static bool is_exactly(uint64_t number, const ocp_activity *activity) {
  ocp_source source;
  if (!ocp_source_find(number, &source))
    return false;
  switch (source.record->kind) {
  case OCP_RECORD_LAUNCH:
    return activity->kind == OCP_ACTIVITY_KERNEL && activity->kernel && strcmp(activity->kernel, source.kernel) == 0;
  case OCP_RECORD_COPY:
    return activity->kind == OCP_ACTIVITY_COPY;
  case OCP_RECORD_MEMSET:
    return activity->kind == OCP_ACTIVITY_SET;
  default:
    return false;
  }
}

static bool is_library(uint64_t number) {
  ocp_source source;
  return ocp_source_find(number, &source) && source.record->kind == OCP_RECORD_LIBRARY;
}

static bool is_upload(uint64_t number) {
  ocp_source source;
  return ocp_source_find(number, &source) && source.record->kind == OCP_RECORD_UPLOAD;
}

/* Attributes the activities of one graph launch, in their order, to the sources of the graph's nodes. Uploads are a
 * separate chain of nodes. Only uploads copy from the host. They run in their order, at any time between the other
 * nodes. */
static void resolve(ocp_activity *activities, size_t count) {
  uint32_t num_sources, next = 0, upload = 0;
  const uint64_t *sources = ocp_tracer_layout(activities->layout, &num_sources);
  uint64_t library = 0; /* source of the library call whose kernels are being matched */
  for (size_t i = 0; i < count && sources; i++) {
    while (upload < num_sources && !is_upload(sources[upload]))
      upload++;
    if (upload < num_sources && activities[i].kind == OCP_ACTIVITY_COPY &&
        activities[i].direction == OCP_ACTIVITY_H2D) {
      activities[i].source = sources[upload++];
      continue;
    }
    while (next < num_sources && is_upload(sources[next]))
      next++;
    if (next < num_sources && is_exactly(sources[next], &activities[i])) {
      activities[i].source = sources[next++];
      library = 0;
      continue;
    }
    /* The kernel may belong to the next library call, or to work that has no source. Nothing tells the kernels of two
     * adjacent library calls apart: all are attributed to the second call. */
    while (next < num_sources && is_library(sources[next]))
      library = sources[next++];
    if (library)
      activities[i].source = library;
  }
}

void ocp_profile_resolve_graphs(ocp_activity *activities, size_t count) {
  bool any = false;
  for (size_t i = 0; i < count && !any; i++)
    any = activities[i].layout != 0;
  if (!any)
    return;
  qsort(activities, count, sizeof *activities, by_launch);
  for (size_t first = 0, end; first < count; first = end) {
    for (end = first + 1; end < count && activities[end].launch == activities[first].launch; end++) {
    }
    if (activities[first].layout)
      resolve(activities + first, end - first);
  }
}
