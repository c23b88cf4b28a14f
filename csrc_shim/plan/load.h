/* Loads plans from their serialized form; queries in-place rules and node names of a plan. */
#ifndef OCP_PLAN_LOAD_H
#define OCP_PLAN_LOAD_H

#include "base/error.h"
#include "plan/plan.h"

/* Copies the blob, checks the copy, and makes a plan from it. Returns NULL with the error if a check fails or memory
 * runs out. */
ocp_plan *ocp_plan_load(const void *blob, size_t bytes, ocp_error *error);
void ocp_plan_free(ocp_plan *plan);

/* Whether an input and an output may share memory. */
typedef enum ocp_sharing {
  OCP_SHARING_NONE,     /* the output may not be written while the input is read */
  OCP_SHARING_IN_ORDER, /* the input is not read after the output is written: they may overlap in any way */
  OCP_SHARING_ELEMENTS, /* as OCP_IN_PLACE_ELEMENTS */
  OCP_SHARING_KEPT      /* as OCP_IN_PLACE_KEPT */
} ocp_sharing;
ocp_sharing ocp_plan_sharing(const ocp_plan *plan, uint32_t input, uint32_t output);

/* Return the label of a node for errors, its name (*bytes long, not terminated), and its operator type. */
const char *ocp_plan_node_name(const ocp_plan *plan, uint32_t node);
const char *ocp_plan_node_own_name(const ocp_plan *plan, uint32_t node, size_t *bytes);
const char *ocp_plan_node_op_type(const ocp_plan *plan, uint32_t node);

#endif
