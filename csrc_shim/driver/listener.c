#include "driver/listener.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

enum { MAX_ACTIVITIES = 1 << 20 }; /* maximum number of activities per listener; ORT's profiler keeps 10^6 events */

struct ocp_listener {
  uint64_t number;
  struct ocp_listener *next;
  ocp_activity *activities;
  size_t count, capacity, lost;
};

atomic_uint ocp_num_listeners;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards the variables below and the listeners */
static ocp_listener *listeners;
static uint64_t last_number;

int64_t ocp_activity_now(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

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

uint64_t ocp_listener_number(const ocp_listener *listener) { return listener->number; }

bool ocp_listener_is_open(uint64_t number) {
  pthread_mutex_lock(&lock);
  const bool is_open = find(number) != NULL;
  pthread_mutex_unlock(&lock);
  return is_open;
}
