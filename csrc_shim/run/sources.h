/* The numbers of the records of all plans, by which what devices did finds its ONNX nodes (driver/activity.h). */
#ifndef OCP_RUN_SOURCES_H
#define OCP_RUN_SOURCES_H

#include <stdbool.h>
#include <stdint.h>

#include "plan/load.h"
#include "run/instance_state.h"

typedef struct ocp_source {
  const char *cluster;
  const char *kernel; /* NULL: a copy, memset or library call */
  const ocp_plan *plan;
  const ocp_plan_record *record;
} ocp_source;

/* Gives the records of a new variant their numbers: variant->first_source and following. False: out of memory. */
bool ocp_sources_add(ocp_variant *variant);
/* Before the variant is freed. While somebody listens, this keeps what its numbers stand for, and takes the plan over.
 */
void ocp_sources_remove(ocp_variant *variant);
/* What a number stands for; valid as long as the caller listens. */
bool ocp_source_find(uint64_t number, ocp_source *source);
/* Frees what was kept, if nobody listens any more. */
void ocp_sources_sweep(void);

#endif
