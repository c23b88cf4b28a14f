/* Evaluation of the expressions of a plan, with every overflow detected. */
#include "plan/expr.h"

/* Computes the quotient, rounded toward zero; false for division by zero, and for INT64_MIN / -1, which overflows. */
static bool divide(int64_t a, int64_t b, int64_t *quotient) {
  if (b == 0 || (a == INT64_MIN && b == -1))
    return false;
  *quotient = a / b;
  return true;
}

static bool floor_divide(int64_t a, int64_t b, int64_t *quotient) {
  if (!divide(a, b, quotient))
    return false;
  *quotient -= a % b != 0 && (a < 0) != (b < 0);
  return true;
}

static bool ceil_divide(int64_t a, int64_t b, int64_t *quotient) {
  if (!divide(a, b, quotient))
    return false;
  *quotient += a % b != 0 && (a < 0) == (b < 0);
  return true;
}

static bool modulo(int64_t a, int64_t b, int64_t *remainder) {
  if (b == 0)
    return false;
  *remainder = b == -1 ? 0 : a % b;
  if (*remainder != 0 && (*remainder < 0) != (b < 0))
    *remainder += b;
  return true;
}

bool ocp_expr_evaluate(const ocp_plan_expr *e, int64_t *registers) {
  int64_t *const dst = &registers[e->dst];
  if (e->op == OCP_EXPR_CONST) {
    *dst = e->imm;
    return true;
  }
  const int64_t a = registers[e->a], b = registers[e->b];
  int64_t value;
  switch ((ocp_expr_op)e->op) {
  case OCP_EXPR_ADD:
    if (__builtin_add_overflow(a, b, &value))
      return false;
    break;
  case OCP_EXPR_SUB:
    if (__builtin_sub_overflow(a, b, &value))
      return false;
    break;
  case OCP_EXPR_MUL:
    if (__builtin_mul_overflow(a, b, &value))
      return false;
    break;
  case OCP_EXPR_FLOORDIV:
    if (!floor_divide(a, b, &value))
      return false;
    break;
  case OCP_EXPR_MOD:
    if (!modulo(a, b, &value))
      return false;
    break;
  case OCP_EXPR_CEILDIV:
    if (!ceil_divide(a, b, &value))
      return false;
    break;
  case OCP_EXPR_TRUNCDIV:
    if (!divide(a, b, &value))
      return false;
    break;
  case OCP_EXPR_MIN:
    value = a < b ? a : b;
    break;
  case OCP_EXPR_MAX:
    value = a > b ? a : b;
    break;
  case OCP_EXPR_EQ:
    value = a == b;
    break;
  case OCP_EXPR_NE:
    value = a != b;
    break;
  case OCP_EXPR_LT:
    value = a < b;
    break;
  case OCP_EXPR_LE:
    value = a <= b;
    break;
  case OCP_EXPR_AND:
    value = a != 0 && b != 0;
    break;
  case OCP_EXPR_OR:
    value = a != 0 || b != 0;
    break;
  case OCP_EXPR_SELECT:
    value = a != 0 ? b : registers[e->c];
    break;
  default:
    return false; /* unreachable: the loader accepts no other operation */
  }
  *dst = value;
  return true;
}
