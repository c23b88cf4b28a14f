/* Evaluation of the expressions of a plan. */
#ifndef OCP_PLAN_EXPR_H
#define OCP_PLAN_EXPR_H

#include <stdbool.h>

#include "plan/format.h"

/* registers[e->dst] = e; false, leaving it as it was, when that overflows int64 or divides by zero. */
bool ocp_expr_evaluate(const ocp_plan_expr *e, int64_t *registers);

#endif
