/* Checks plans: every index and range is valid, and registers are defined before they are used. */
#ifndef OCP_PLAN_CHECK_H
#define OCP_PLAN_CHECK_H

#include "base/error.h"
#include "plan/plan.h"

/* Whether the plan is consistent; false with the error. The plan's arrays and segment views must be set. */
bool ocp_plan_check(const ocp_plan *plan, ocp_error *error);
/* Sets the error "invalid plan: ..." and returns false. */
bool ocp_plan_reject(ocp_error *error, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Returns the number of operands of an operation. */
uint32_t ocp_plan_num_operands(uint32_t op);

#endif
