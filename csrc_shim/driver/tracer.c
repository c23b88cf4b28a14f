#include "driver/tracer.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_MARKS = 1 << 20 };

/* Work that was enqueued under one external correlation id of CUPTI: the ORT events that own it, and the source and
 * layout that name its nodes (driver/activity.h). */
typedef struct mark {
  ocp_activity_owners owners;
  uint64_t source, layout;
} mark;

typedef struct layout {
  uint64_t *sources;
  uint32_t count;
} layout;

atomic_bool ocp_tracer_is_on;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards the variables below */
static ocp_tracer_functions functions;
static uint32_t session;
static mark *marks; /* the correlation id of a mark is its index + 1 */
static size_t num_marks, max_marks;
static layout *layouts; /* the number of a layout is its index + 1 */
static size_t num_layouts, max_layouts;
/* Interned kernel names, kept for the life of the process: activities refer to them. */
static char **names;
static size_t num_names, max_names;

/* Grows an array if it has no space for one more element; false: out of memory. `array` points to the pointer. */
static bool grow(void *array, size_t count, size_t *max, size_t element) {
  if (count < *max)
    return true;
  void *old;
  memcpy(&old, array, sizeof old);
  const size_t grown = *max ? 2 * *max : 64;
  void *more = realloc(old, grown * element);
  if (!more)
    return false;
  memcpy(array, &more, sizeof more);
  *max = grown;
  return true;
}

void ocp_tracer_start(const ocp_tracer_functions *with) {
  pthread_mutex_lock(&lock);
  functions = *with;
  session++;
  pthread_mutex_unlock(&lock);
  atomic_store(&ocp_tracer_is_on, true);
}

void ocp_tracer_stop(void) {
  atomic_store(&ocp_tracer_is_on, false);
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < num_layouts; i++)
    free(layouts[i].sources);
  free(layouts);
  free(marks);
  marks = NULL;
  layouts = NULL;
  num_marks = max_marks = num_layouts = max_layouts = 0;
  pthread_mutex_unlock(&lock);
}

/* Returns the number of the layout that holds the graph's sources in this session of the tracer, and makes the layout
 * on first use; 0: out of memory. */
static uint64_t layout_of(ocp_graph_sources *graph) {
  if (graph->session == session && graph->layout)
    return graph->layout;
  layout own = {malloc(graph->count * sizeof *own.sources + 1), graph->count};
  if (!own.sources || !grow(&layouts, num_layouts, &max_layouts, sizeof *layouts)) {
    free(own.sources);
    return 0;
  }
  if (graph->count)
    memcpy(own.sources, graph->each, graph->count * sizeof *own.sources);
  layouts[num_layouts++] = own;
  graph->session = session;
  return graph->layout = num_layouts;
}

bool ocp_tracer_push(const ocp_activity_owners *owners, uint64_t source, ocp_graph_sources *graph) {
  pthread_mutex_lock(&lock);
  const bool fits = ocp_is_tracing() && num_marks < MAX_MARKS && grow(&marks, num_marks, &max_marks, sizeof *marks);
  if (fits)
    marks[num_marks++] = (mark){*owners, source, graph ? layout_of(graph) : 0};
  const uint64_t id = num_marks;
  const ocp_tracer_functions own = functions;
  pthread_mutex_unlock(&lock);
  return fits && own.push(own.kind, id) == 0;
}

void ocp_tracer_pop(void) {
  uint64_t id;
  pthread_mutex_lock(&lock);
  const ocp_tracer_functions own = functions;
  pthread_mutex_unlock(&lock);
  own.pop(own.kind, &id);
}

const uint64_t *ocp_tracer_layout(uint64_t number, uint32_t *count) {
  pthread_mutex_lock(&lock);
  const layout *found = number && number <= num_layouts ? &layouts[number - 1] : NULL;
  const uint64_t *sources = found ? found->sources : NULL;
  *count = found ? found->count : 0;
  pthread_mutex_unlock(&lock);
  return sources;
}

/* Interns the name. Kernels are few and profiles rare, so a list suffices. */
static const char *kept_name(const char *name) {
  for (size_t i = 0; i < num_names; i++)
    if (strcmp(names[i], name) == 0)
      return names[i];
  char *own = grow(&names, num_names, &max_names, sizeof *names) ? strdup(name) : NULL;
  return own ? names[num_names++] = own : NULL;
}

void ocp_tracer_deliver(const ocp_trace_record *record) {
  pthread_mutex_lock(&lock);
  const bool known = record->id && record->id <= num_marks;
  const mark own = known ? marks[record->id - 1] : (mark){0};
  const char *kernel = known && record->kernel ? kept_name(record->kernel) : NULL;
  pthread_mutex_unlock(&lock);
  if (!known)
    return;
  ocp_activity activity = {
      .source = own.source,
      .begin = record->begin,
      .end = record->end,
      .kernel = kernel,
      .stream = record->stream,
      .bytes = record->bytes,
      .dynamic = record->dynamic,
      .kind = (uint8_t)record->kind,
      .direction = (uint8_t)record->direction,
      .in_graph = record->in_graph,
      .device = record->device,
      .layout = own.layout,
      .launch = record->launch,
  };
  memcpy(activity.grid, record->grid, sizeof activity.grid);
  memcpy(activity.block, record->block, sizeof activity.block);
  ocp_activity_deliver(&own.owners, &activity);
}
