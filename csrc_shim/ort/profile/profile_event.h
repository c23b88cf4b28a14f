/* Converts activities of a device into events of ORT's profile. */
#ifndef OCP_ORT_PROFILE_PROFILE_EVENT_H
#define OCP_ORT_PROFILE_PROFILE_EVENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "driver/activity.h"

/* Interned names, which live as long as the profile. */
typedef struct ocp_profile_names {
  char **table; /* open addressing; NULL: empty slot */
  size_t count, capacity;
} ocp_profile_names;
/* Returns the interned name; NULL: out of memory. */
const char *ocp_profile_name(ocp_profile_names *names, const char *name);
void ocp_profile_names_free(ocp_profile_names *names);

/* The event of ORT's profile in which work was enqueued. */
typedef struct ocp_profile_parent {
  uint64_t event;
  const char *name;    /* NULL: unknown */
  const char *op_type; /* NULL: not an event of a node */
} ocp_profile_parent;

typedef struct ocp_profile {
  const char *provider;
  bool emulated;
  int64_t origin; /* start of ORT's profile, CLOCK_MONOTONIC nanoseconds */
  ocp_activity *activities;
  size_t num_activities, num_lost;
  ocp_profile_parent *parents;
  size_t num_parents;
} ocp_profile;

/* Adds the events in order of their start times. Sorts the profile's activities. */
OrtStatus *ocp_profile_write(ocp_profile *profile, OrtProfilingEventsContainer *container);

#endif
