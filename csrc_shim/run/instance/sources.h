/* Source ids for profiles: each record of a plan has a number, by which a kernel or copy that a device ran is
 * attributed to its ONNX nodes (driver/activity.h). */
#ifndef OCP_RUN_INSTANCE_SOURCES_H
#define OCP_RUN_INSTANCE_SOURCES_H

#include <stdbool.h>
#include <stdint.h>

#include "plan/load.h"
#include "run/instance/instance_state.h"

typedef struct ocp_source {
  const char *cluster;
  const char *kernel; /* NULL: a copy, memset or library call */
  const ocp_plan *plan;
  const ocp_plan_record *record;
} ocp_source;

/* Assigns numbers to the records of a new variant, from variant->first_source on. False: out of memory. */
bool ocp_sources_add(ocp_variant *variant);
/* Called before the variant is freed. While a profile is open, takes ownership of the plan, so that the profile can
 * resolve the numbers of its records. */
void ocp_sources_remove(ocp_variant *variant);
/* Finds the record with this number. Returns false for an unknown number. The result is valid while the caller's
 * profile is open. */
bool ocp_source_find(uint64_t number, ocp_source *source);
/* Frees the plans that ocp_sources_remove has taken, unless a profile is open. */
void ocp_sources_sweep(void);

#endif
