/* Evaluation of the expressions of a plan. */
#ifndef OCP_PLAN_EXPR_H
#define OCP_PLAN_EXPR_H

#include <stdbool.h>

#include "plan/format.h"

/* Sets registers[e->dst] to the expression's value. Returns false, and leaves the register unchanged, on int64
 * overflow or division by zero. */
bool ocp_expr_evaluate(const ocp_plan_expr *e, int64_t *registers);

#endif
