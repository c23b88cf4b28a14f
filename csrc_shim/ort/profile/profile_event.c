/* Builds events of ORT's profile. ORT writes their names and arguments into its file unescaped, in quotes unless the
 * argument begins with [ or {. So this file escapes text and writes lists as JSON. */
#include "ort/profile/profile_event.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/host.h"
#include "ort/profile/profile_graph.h"
#include "plan/load.h"
#include "run/instance/sources.h"

/* ---- names ---- */

static uint64_t hash(const char *name) {
  uint64_t value = UINT64_C(14695981039346656037);
  for (; *name; name++)
    value = (value ^ (unsigned char)*name) * UINT64_C(1099511628211);
  return value;
}

static char **slot_of(const ocp_profile_names *names, const char *name) {
  size_t index = hash(name) & (names->capacity - 1);
  while (names->table[index] && strcmp(names->table[index], name) != 0)
    index = (index + 1) & (names->capacity - 1);
  return &names->table[index];
}

static bool grow_names(ocp_profile_names *names) {
  ocp_profile_names grown = {.count = names->count, .capacity = names->capacity ? 2 * names->capacity : 64};
  grown.table = calloc(grown.capacity, sizeof *grown.table);
  if (!grown.table)
    return false;
  for (size_t i = 0; i < names->capacity; i++)
    if (names->table[i])
      *slot_of(&grown, names->table[i]) = names->table[i];
  free(names->table);
  *names = grown;
  return true;
}

const char *ocp_profile_name(ocp_profile_names *names, const char *name) {
  if (2 * names->count >= names->capacity && !grow_names(names))
    return NULL;
  char **slot = slot_of(names, name);
  if (!*slot && (*slot = strdup(name)))
    names->count++;
  return *slot;
}

void ocp_profile_names_free(ocp_profile_names *names) {
  for (size_t i = 0; i < names->capacity; i++)
    free(names->table[i]);
  free(names->table);
  *names = (ocp_profile_names){0};
}

/* ---- text ---- */

typedef struct text {
  char *data;
  size_t count, capacity;
  bool failed; /* true: out of memory */
} text;

static void add_bytes(text *t, const char *bytes, size_t count) {
  if (t->failed)
    return;
  if (t->count + count + 1 > t->capacity) {
    const size_t grown = 2 * (t->count + count + 1);
    char *data = realloc(t->data, grown);
    if (!data) {
      t->failed = true;
      return;
    }
    t->data = data;
    t->capacity = grown;
  }
  memcpy(t->data + t->count, bytes, count);
  t->count += count;
  t->data[t->count] = 0;
}

static void add(text *t, const char *part) { add_bytes(t, part, strlen(part)); }

static void add_escaped(text *t, const char *part, size_t count) {
  for (size_t i = 0; i < count; i++) {
    const unsigned char c = (unsigned char)part[i];
    if (c == '"' || c == '\\')
      add_bytes(t, "\\", 1);
    if (c >= 0x20) {
      add_bytes(t, part + i, 1);
      continue;
    }
    char code[8];
    snprintf(code, sizeof code, "\\u%04x", c);
    add(t, code);
  }
}

static void add_number(text *t, uint64_t number) {
  char digits[24];
  snprintf(digits, sizeof digits, "%llu", (unsigned long long)number);
  add(t, digits);
}

/* ---- one event ---- */

enum { MAX_ARGS = 24 };

typedef struct event {
  text name;
  text values[MAX_ARGS];
  const char *keys[MAX_ARGS];
  size_t num_args;
} event;

static text *argument(event *e, const char *key) {
  text *value = &e->values[e->num_args];
  value->count = 0;
  e->keys[e->num_args++] = key;
  return value;
}

static void free_event(event *e) {
  free(e->name.data);
  for (size_t i = 0; i < MAX_ARGS; i++)
    free(e->values[i].data);
}

static void add_text(event *e, const char *key, const char *value) {
  add_escaped(argument(e, key), value, strlen(value));
}

static void add_triple(event *e, const char *key, const uint32_t *numbers) {
  text *t = argument(e, key);
  for (int i = 0; i < 3; i++) {
    add(t, i ? ", " : "[");
    add_number(t, numbers[i]);
  }
  add(t, "]");
}

/* Adds the grid and block sizes in the format of ORT's CUDA profiler, for tools that read its files. They are -1 unless
 * the activity is a kernel. */
static void add_sizes(event *e, const ocp_activity *activity) {
  static const char *const keys[] = {"grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z"};
  for (int i = 0; i < 6; i++) {
    text *t = argument(e, keys[i]);
    if (activity->kind == OCP_ACTIVITY_KERNEL)
      add_number(t, i < 3 ? activity->grid[i] : activity->block[i - 3]);
    else
      add(t, "-1");
  }
}

/* Appends an item to an open JSON list of strings. */
static void add_item(text *t, const char *item, size_t count) {
  add(t, t->count ? ", \"" : "[\"");
  add_escaped(t, item, count);
  add(t, "\"");
}

static void end_list(text *t) { add(t, t->count ? "]" : "[]"); }

/* Adds the node of ORT's event. The name of the event is the node's name and a suffix. */
static void add_parent_node(text *names, text *types, const ocp_profile_parent *parent) {
  static const char ending[] = "_kernel_time";
  size_t count = strlen(parent->name);
  if (count >= sizeof ending - 1 && strcmp(parent->name + count - (sizeof ending - 1), ending) == 0)
    count -= sizeof ending - 1;
  add_item(names, parent->name, count);
  add_item(types, parent->op_type, strlen(parent->op_type));
}

static void add_nodes(event *e, const ocp_source *source, const ocp_profile_parent *parent) {
  text *names = argument(e, "nodes"), *types = argument(e, "op_types");
  if (source) {
    const ocp_plan *plan = source->plan;
    const ocp_plan_record *record = source->record;
    for (uint32_t i = 0; i < record->num_nodes; i++) {
      const uint32_t node = plan->record_nodes[record->first_node + i];
      size_t count;
      const char *name = ocp_plan_node_own_name(plan, node, &count), *type = ocp_plan_node_op_type(plan, node);
      add_item(names, name, count);
      add_item(types, type, strlen(type));
    }
  } else if (parent && parent->name && parent->op_type) {
    add_parent_node(names, types, parent);
  }
  end_list(names);
  end_list(types);
}

static void add_name(event *e, const ocp_activity *activity, const ocp_source *source) {
  static const char *const copies[] = {"memcpy_host_to_device", "memcpy_device_to_host", "memcpy_device_to_device"};
  const char *name = "kernel";
  if (activity->kind == OCP_ACTIVITY_COPY)
    name = copies[activity->direction];
  else if (activity->kind == OCP_ACTIVITY_SET)
    name = "memset";
  else if (activity->kernel)
    name = activity->kernel;
  else if (source && source->kernel)
    name = source->kernel;
  e->name.count = 0;
  add_escaped(&e->name, name, strlen(name));
}

static void describe(event *e, const ocp_profile *profile, const ocp_activity *activity, const ocp_source *source,
                     const ocp_profile_parent *parent) {
  static const char *const kinds[] = {"kernel", "copy", "memset"};
  const bool library = source && source->record->kind == OCP_RECORD_LIBRARY;
  add_name(e, activity, source);
  add_text(e, "provider", profile->provider);
  add_text(e, "kind", library ? "library" : kinds[activity->kind]);
  add_nodes(e, source, parent);
  if (source) {
    add_text(e, "cluster", source->cluster);
    add_number(argument(e, "step"), (uint64_t)(source->record - source->plan->records));
  }
  if (parent && parent->name)
    add_text(e, "ort_event", parent->name);
  add_number(argument(e, "ort_event_id"), activity->event);
  if (activity->kind == OCP_ACTIVITY_KERNEL) {
    add_triple(e, "grid", activity->grid);
    add_triple(e, "block", activity->block);
    add_number(argument(e, "dynamic_shared_bytes"), activity->dynamic);
  } else {
    add_number(argument(e, "bytes"), activity->bytes);
  }
  add_sizes(e, activity);
  char stream[24];
  snprintf(stream, sizeof stream, "0x%llx", (unsigned long long)activity->stream);
  add_text(e, "stream", stream);
  add_text(e, "device_kind", profile->emulated ? "emulated" : "cuda");
  add_number(argument(e, "device"), (uint64_t)activity->device);
  add_text(e, "graph", activity->in_graph ? "1" : "0");
  add_number(argument(e, "duration_ns"), (uint64_t)(activity->end - activity->begin));
}

/* Converts nanoseconds to microseconds and rounds down, as ORT does. */
static int64_t microseconds(int64_t nanoseconds) {
  return nanoseconds < 0 ? -((-nanoseconds + 999) / 1000) : nanoseconds / 1000;
}

static OrtStatus *write_event(event *e, const ocp_profile *profile, const ocp_activity *activity,
                              OrtProfilingEventsContainer *container) {
  /* Rounds both ends, not the duration, so that the sum of many short durations is right. */
  const int64_t begin = microseconds(activity->begin - profile->origin),
                end = microseconds(activity->end - profile->origin);
  /* Activities without a host thread get a thread id per stream. CUPTI's stream ids are small numbers; other values are
   * addresses, shifted to fit an int32. */
  const uint64_t row = activity->stream <= INT32_MAX ? activity->stream : activity->stream >> 4 & INT32_MAX;
  const int32_t thread = activity->thread ? activity->thread : (int32_t)row;
  const char *values[MAX_ARGS];
  bool failed = e->name.failed;
  for (size_t i = 0; i < e->num_args; i++) {
    failed |= e->values[i].failed;
    values[i] = e->values[i].count ? e->values[i].data : "";
  }
  if (failed)
    return ocp_api->CreateStatus(ORT_FAIL, OCP_OUT_OF_HOST_MEMORY);
  OrtProfilingEvent *made = NULL;
  OrtStatus *status =
      ocp_ep_api->CreateProfilingEvent(OrtProfilingEventCategory_KERNEL, (int32_t)getpid(), thread, e->name.data, begin,
                                       end - begin, e->keys, values, e->num_args, &made);
  if (status)
    return status;
  const OrtProfilingEvent *one = made;
  status = ocp_ep_api->ProfilingEventsContainer_AddEvents(container, &one, 1);
  ocp_ep_api->ReleaseProfilingEvent(made);
  return status;
}

/* ---- all events ---- */

static int by_event(const void *a, const void *b) {
  const uint64_t x = ((const ocp_profile_parent *)a)->event, y = ((const ocp_profile_parent *)b)->event;
  return (x > y) - (x < y);
}

static int by_begin(const void *a, const void *b) {
  const int64_t x = ((const ocp_activity *)a)->begin, y = ((const ocp_activity *)b)->begin;
  return (x > y) - (x < y);
}

OrtStatus *ocp_profile_write(ocp_profile *profile, OrtProfilingEventsContainer *container) {
  if (profile->num_parents)
    qsort(profile->parents, profile->num_parents, sizeof *profile->parents, by_event);
  ocp_profile_resolve_graphs(profile->activities, profile->num_activities);
  if (profile->num_activities)
    qsort(profile->activities, profile->num_activities, sizeof *profile->activities, by_begin);
  event e = {0};
  OrtStatus *status = NULL;
  for (size_t i = 0; i < profile->num_activities && !status; i++) {
    const ocp_activity *activity = &profile->activities[i];
    const ocp_profile_parent key = {.event = activity->event};
    const ocp_profile_parent *parent =
        profile->num_parents ? bsearch(&key, profile->parents, profile->num_parents, sizeof key, by_event) : NULL;
    ocp_source source;
    const bool known = activity->source && ocp_source_find(activity->source, &source);
    e.num_args = 0;
    describe(&e, profile, activity, known ? &source : NULL, parent);
    status = write_event(&e, profile, activity, container);
  }
  free_event(&e);
  if (profile->num_lost) {
    char line[160];
    snprintf(line, sizeof line,
             "the profile lacks %zu device events: the plugin keeps at most 2^20, fewer if host memory is exhausted. "
             "Profile fewer Runs",
             profile->num_lost);
    ocp_log(ORT_LOGGING_LEVEL_WARNING, line, OCP_EP_NAME);
  }
  return status;
}
