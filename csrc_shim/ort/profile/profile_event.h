/* Converts activities of a device into events of ORT's profile. */
#ifndef OCP_ORT_PROFILE_PROFILE_EVENT_H
#define OCP_ORT_PROFILE_PROFILE_EVENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "driver/activity.h"

/* Names that come again and again, each kept once. */
typedef struct ocp_profile_names {
  char **table; /* open addressing; NULL: unused */
  size_t count, capacity;
} ocp_profile_names;
/* The kept name; NULL: out of memory. */
const char *ocp_profile_name(ocp_profile_names *names, const char *name);
void ocp_profile_names_free(ocp_profile_names *names);

/* An event of ORT's, in which work was enqueued. */
typedef struct ocp_profile_parent {
  uint64_t event;
  const char *name;    /* NULL: unknown */
  const char *op_type; /* NULL: it is of no node */
} ocp_profile_parent;

typedef struct ocp_profile {
  const char *provider;
  bool emulated;
  int64_t origin; /* ORT's time 0, by the clock of the activities */
  ocp_activity *activities;
  size_t num_activities, num_lost;
  ocp_profile_parent *parents;
  size_t num_parents;
} ocp_profile;

/* Adds the events in the order of their beginnings. Sorts what the profile has. */
OrtStatus *ocp_profile_write(ocp_profile *profile, OrtProfilingEventsContainer *container);

#endif
