#define _GNU_SOURCE /* gettid */
#include "driver/activity.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "driver/tracer.h"

enum {
  MAX_ACTIVITIES = 1 << 20, /* of a listener: as many events as ORT keeps */
  MAX_DEPTH = 16,           /* of events in each other */
};

struct ocp_listener {
  uint64_t number;
  struct ocp_listener *next;
  ocp_activity *activities;
  size_t count, capacity, lost;
};

atomic_uint ocp_num_listeners;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards all that follows and the listeners */
static ocp_listener *listeners;
static uint64_t last_number;
static atomic_ullong next_event = 1;

/* The events of a listener that a thread is in. */
typedef struct entered {
  uint64_t listener;
  uint32_t depth;
  struct {
    uint64_t key;
    ocp_left_event event;
    bool is_traced; /* the tracer knows of it */
  } events[MAX_DEPTH];
} entered;

/* Made when the thread first needs it: the loader has little room for thread-local data. */
typedef struct thread_state {
  uint64_t source;
  bool is_traced; /* the tracer knows of the source */
  bool is_noting;
  ocp_graph_sources noted;
  int32_t number;
  entered places[OCP_MAX_OWNERS];
} thread_state;
static _Thread_local thread_state *mine;
static pthread_key_t thread_key; /* frees it with the thread */
static bool has_thread_key;

int64_t ocp_activity_now(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void free_state(void *state) {
  ocp_graph_sources_clear(&((thread_state *)state)->noted);
  free(state);
}

static void make_thread_key(void) { has_thread_key = pthread_key_create(&thread_key, free_state) == 0; }

/* The calling thread's state; NULL: out of memory. */
static thread_state *my_state(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  if (mine)
    return mine;
  pthread_once(&once, make_thread_key);
  thread_state *made = has_thread_key ? calloc(1, sizeof *made) : NULL;
  if (made && pthread_setspecific(thread_key, made)) {
    free(made);
    made = NULL;
  }
  if (made)
    made->number = (int32_t)syscall(SYS_gettid);
  return mine = made;
}

int32_t ocp_activity_thread(void) { return mine ? mine->number : 0; }

/* ---- listeners ---- */

static ocp_listener *find(uint64_t number) {
  ocp_listener *listener = listeners;
  while (listener && listener->number != number)
    listener = listener->next;
  return listener;
}

ocp_listener *ocp_listener_create(void) {
  ocp_listener *listener = calloc(1, sizeof *listener);
  if (!listener)
    return NULL;
  pthread_mutex_lock(&lock);
  listener->number = ++last_number;
  pthread_mutex_unlock(&lock);
  return listener;
}

void ocp_listener_open(ocp_listener *listener) {
  pthread_mutex_lock(&lock);
  if (!find(listener->number)) {
    listener->next = listeners;
    listeners = listener;
    atomic_fetch_add(&ocp_num_listeners, 1);
  }
  pthread_mutex_unlock(&lock);
}

void ocp_listener_close(ocp_listener *listener) {
  pthread_mutex_lock(&lock);
  for (ocp_listener **link = &listeners; *link; link = &(*link)->next)
    if (*link == listener) {
      *link = listener->next;
      atomic_fetch_sub(&ocp_num_listeners, 1);
      break;
    }
  pthread_mutex_unlock(&lock);
}

void ocp_listener_destroy(ocp_listener *listener) {
  if (!listener)
    return;
  ocp_listener_close(listener);
  free(listener->activities);
  free(listener);
}

/* The place of a listener among the calling thread's; one that has ended leaves its place to another. */
static entered *place_of(uint64_t listener) {
  entered *unused = NULL;
  for (int i = 0; i < OCP_MAX_OWNERS; i++) {
    if (mine->places[i].listener == listener)
      return &mine->places[i];
    if (!mine->places[i].depth)
      unused = &mine->places[i];
  }
  pthread_mutex_lock(&lock);
  for (int i = 0; i < OCP_MAX_OWNERS && !unused; i++)
    if (!find(mine->places[i].listener))
      unused = &mine->places[i];
  pthread_mutex_unlock(&lock);
  if (unused)
    *unused = (entered){.listener = listener};
  return unused;
}

void ocp_listener_enter(ocp_listener *listener, uint64_t key) {
  entered *place = my_state() ? place_of(listener->number) : NULL;
  if (!place)
    return;
  if (place->depth == MAX_DEPTH) { /* ORT left out the ends of some: the oldest */
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
    if (place->listener != listener->number)
      continue;
    for (uint32_t depth = place->depth; depth-- > 0;)
      if (place->events[depth].key == key) {
        while (place->depth > depth) /* and those in it whose end ORT left out */
          if (place->events[--place->depth].is_traced)
            ocp_tracer_pop();
        return place->events[depth].event;
      }
  }
  return (ocp_left_event){0};
}

ocp_activity *ocp_listener_take(ocp_listener *listener, size_t *count, size_t *lost) {
  pthread_mutex_lock(&lock);
  ocp_activity *activities = listener->activities;
  *count = listener->count;
  *lost = listener->lost;
  listener->activities = NULL;
  listener->count = listener->capacity = listener->lost = 0;
  pthread_mutex_unlock(&lock);
  return activities;
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

void ocp_activity_of(uint64_t source) {
  if (!(source ? my_state() : mine))
    return;
  mine->source = source;
  untrace();
  if (source && mine->is_noting)
    note(source);
  ocp_activity_owners owners;
  if (source && ocp_is_tracing() && ocp_activity_owned(&owners))
    mine->is_traced = ocp_tracer_push(&owners, source, NULL);
}

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

static void keep(ocp_listener *listener, const ocp_activity *activity) {
  if (listener->count == listener->capacity && listener->capacity < MAX_ACTIVITIES) {
    const size_t grown = listener->capacity ? 2 * listener->capacity : 1024;
    ocp_activity *activities = realloc(listener->activities, grown * sizeof *activities);
    if (activities) {
      listener->activities = activities;
      listener->capacity = grown;
    }
  }
  if (listener->count < listener->capacity)
    listener->activities[listener->count++] = *activity;
  else
    listener->lost++;
}

void ocp_activity_deliver(const ocp_activity_owners *owners, ocp_activity *activity) {
  pthread_mutex_lock(&lock);
  for (int i = 0; i < OCP_MAX_OWNERS; i++) {
    ocp_listener *listener = owners->each[i].listener ? find(owners->each[i].listener) : NULL;
    if (!listener)
      continue;
    activity->event = owners->each[i].event;
    keep(listener, activity);
  }
  pthread_mutex_unlock(&lock);
}
