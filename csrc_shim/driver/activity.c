#define _GNU_SOURCE /* gettid */
#include "driver/activity.h"

#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/thread_memory.h"

enum { MAX_DEPTH = 16 }; /* maximum nesting depth of profile events, per thread and listener */

static atomic_ullong next_event = 1;

/* The profile events of one listener that have begun on a thread and not yet ended; the innermost is last. */
typedef struct entered {
  uint64_t listener;
  uint32_t depth;
  struct {
    uint64_t key;
    ocp_left_event event;
    bool is_traced; /* true: pushed to the tracer, so its end must pop it */
  } events[MAX_DEPTH];
} entered;

typedef struct thread_state {
  uint64_t source;
  bool is_traced; /* true: the source is pushed to the tracer, and must be popped */
  bool is_noting;
  ocp_graph_sources noted;
  int32_t number;
  entered places[OCP_MAX_OWNERS];
} thread_state;
static _Thread_local thread_state *mine;

static void free_state(void *state) {
  ocp_graph_sources_clear(&((thread_state *)state)->noted);
  free(state);
}

/* Returns the calling thread's state, made on first use; NULL: out of memory. */
static thread_state *my_state(void) {
  static ocp_thread_memory states = {.release = free_state};
  if (!mine && (mine = ocp_thread_memory_make(&states, sizeof *mine)))
    mine->number = (int32_t)syscall(SYS_gettid);
  return mine;
}

int32_t ocp_activity_thread(void) { return mine ? mine->number : 0; }

/* ---- events ---- */

/* Finds the calling thread's entry for a listener. If there is none, reuses an entry without open events, or the entry
 * of a closed listener. NULL: all entries are in use. */
static entered *place_of(uint64_t listener) {
  entered *unused = NULL;
  for (int i = 0; i < OCP_MAX_OWNERS; i++) {
    if (mine->places[i].listener == listener)
      return &mine->places[i];
    if (!mine->places[i].depth)
      unused = &mine->places[i];
  }
  for (int i = 0; i < OCP_MAX_OWNERS && !unused; i++)
    if (!ocp_listener_is_open(mine->places[i].listener))
      unused = &mine->places[i];
  if (unused)
    *unused = (entered){.listener = listener};
  return unused;
}

void ocp_listener_enter(ocp_listener *listener, uint64_t key) {
  entered *place = my_state() ? place_of(ocp_listener_number(listener)) : NULL;
  if (!place)
    return;
  if (place->depth == MAX_DEPTH) { /* ORT did not report the end of some events: drop the oldest one */
    memmove(place->events, place->events + 1, (MAX_DEPTH - 1) * sizeof *place->events);
    place->depth--;
  }
  place->events[place->depth].key = key;
  place->events[place->depth].event.event = atomic_fetch_add_explicit(&next_event, 1, memory_order_relaxed);
  place->events[place->depth].is_traced = false;
  place->events[place->depth++].event.since = ocp_activity_now();
  ocp_activity_owners owners;
  if (ocp_is_tracing() && ocp_activity_owned(&owners))
    place->events[place->depth - 1].is_traced = ocp_tracer_push(&owners, 0, NULL);
}

ocp_left_event ocp_listener_leave(const ocp_listener *listener, uint64_t key) {
  for (int i = 0; mine && i < OCP_MAX_OWNERS; i++) {
    entered *place = &mine->places[i];
    if (place->listener != ocp_listener_number(listener))
      continue;
    for (uint32_t depth = place->depth; depth-- > 0;)
      if (place->events[depth].key == key) {
        while (place->depth > depth) /* also ends nested events whose end ORT did not report */
          if (place->events[--place->depth].is_traced)
            ocp_tracer_pop();
        return place->events[depth].event;
      }
  }
  return (ocp_left_event){0};
}

/* ---- work ---- */

static void untrace(void) {
  if (mine->is_traced)
    ocp_tracer_pop();
  mine->is_traced = false;
}

static void note(uint64_t source) {
  ocp_graph_sources *into = &mine->noted;
  if (into->count == into->capacity) {
    const uint32_t grown = into->capacity ? 2 * into->capacity : 16;
    uint64_t *each = realloc(into->each, grown * sizeof *each);
    if (!each)
      return;
    into->each = each;
    into->capacity = grown;
  }
  into->each[into->count++] = source;
}

/* Sets the source of the work that the calling thread enqueues; 0 resets it. Returns false if memory is out, or if
 * there is nothing to reset. */
static bool set_source(uint64_t source) {
  if (!(source ? my_state() : mine))
    return false;
  mine->source = source;
  untrace();
  if (source && mine->is_noting)
    note(source);
  return true;
}

void ocp_activity_of(uint64_t source) {
  ocp_activity_owners owners;
  if (set_source(source) && source && ocp_is_tracing() && ocp_activity_owned(&owners))
    mine->is_traced = ocp_tracer_push(&owners, source, NULL);
}

void ocp_activity_of_node(uint64_t source) { set_source(source); }

void ocp_activity_of_graph(ocp_graph_sources *sources) {
  ocp_activity_owners owners;
  if (ocp_is_tracing() && ocp_activity_owned(&owners))
    mine->is_traced = ocp_tracer_push(&owners, 0, sources);
}

void ocp_activity_begin_graph(void) {
  if (!my_state())
    return;
  mine->noted.count = 0;
  mine->is_noting = true;
}

void ocp_activity_end_graph(ocp_graph_sources *into) {
  if (into)
    ocp_graph_sources_clear(into);
  if (!mine)
    return;
  if (into && mine->is_noting)
    *into = mine->noted;
  else
    free(mine->noted.each);
  mine->noted = (ocp_graph_sources){0};
  mine->is_noting = false;
}

void ocp_graph_sources_clear(ocp_graph_sources *sources) {
  free(sources->each);
  *sources = (ocp_graph_sources){0};
}

uint64_t ocp_activity_source(void) { return mine ? mine->source : 0; }

bool ocp_activity_owned(ocp_activity_owners *owners) {
  if (!ocp_is_anybody_listening() || !mine)
    return false;
  bool any = false;
  for (int i = 0; i < OCP_MAX_OWNERS; i++) {
    const entered *place = &mine->places[i];
    const bool inside = place->depth > 0;
    any |= inside;
    owners->each[i] =
        (ocp_activity_owner){inside ? place->listener : 0, inside ? place->events[place->depth - 1].event.event : 0};
  }
  return any;
}
