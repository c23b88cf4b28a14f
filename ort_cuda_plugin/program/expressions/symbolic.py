"""Symbolic integers: polynomials in canonical form, with integer coefficients, over symbols and opaque operations.

A `Dim` is a plain int or an `Expr`; a constant expression becomes an int. ``a == b`` compares canonical forms, so True
means *provably* equal for all sizes. ``a < b`` raises TypeError. The functions `lt`, `eq`, ... return a Dim that has
the value 0 or 1 in each Run; it becomes an int if the result is the same for all sizes.

The operations, and their results for negative numbers, are those of ``ocp_plan_expr`` in ``csrc_shim/plan/format.h``.
"""

from __future__ import annotations

from collections.abc import Iterable

from .operations import ExprOp
from .polynomial import (
    READ_BACK,
    Atom,
    Bounds,
    Dim,
    Expr,
    Monomial,
    boolean_ops,
    bounds,
    ceildiv,
    divides,
    evaluators,
    floordiv,
    hint,
    is_const,
    is_read_back,
    mod,
    operation,
    single_atom,
    symbol,
    truncdiv,
)

__all__ = [
    "READ_BACK",
    "Atom",
    "Bounds",
    "Dim",
    "Expr",
    "Monomial",
    "bounds",
    "ceildiv",
    "divides",
    "eq",
    "evaluators",
    "floordiv",
    "hint",
    "is_const",
    "is_read_back",
    "le",
    "logical_and",
    "logical_not",
    "logical_or",
    "lt",
    "mod",
    "ne",
    "product",
    "select",
    "single_atom",
    "sym_max",
    "sym_min",
    "symbol",
    "truncdiv",
    "truth",
]


def _difference_bounds(a: Dim, b: Dim) -> Bounds:
    """Return bounds of ``a - b``: the tighter of the polynomial's bounds and those that the bounds of a and b imply."""
    low, high = bounds(a - b)
    (a_low, a_high), (b_low, b_high) = bounds(a), bounds(b)
    lows = [x for x in (low, None if a_low is None or b_high is None else a_low - b_high) if x is not None]
    highs = [x for x in (high, None if a_high is None or b_low is None else a_high - b_low) if x is not None]
    return max(lows, default=None), min(highs, default=None)


def _ordered(a: Dim, b: Dim) -> tuple[Dim, Dim]:
    """Return the arguments of a commutative operation in a canonical order."""
    return (b, a) if hash(a) > hash(b) else (a, b)


def sym_min(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    low, high = _difference_bounds(a, b)
    if high is not None and high <= 0:
        return a
    if low is not None and low >= 0:
        return b
    return _extreme(ExprOp.MIN, a, b)


def sym_max(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    low, high = _difference_bounds(a, b)
    if high is not None and high <= 0:
        return b
    if low is not None and low >= 0:
        return a
    return _extreme(ExprOp.MAX, a, b)


def _extreme(op: ExprOp, a: Dim, b: Dim) -> Dim:
    """Return the minimum or maximum, simplified: ``min(min(a, b), b)`` to ``min(a, b)``, and ``min(max(a, b), b)`` to
    ``b``.
    """
    for outer, inner in ((a, b), (b, a)):
        atom = single_atom(outer)
        if atom is not None and atom.op in (ExprOp.MIN, ExprOp.MAX) and inner in atom.args:
            return outer if atom.op is op else inner
    return operation(op, *_ordered(a, b))


def eq(a: Dim, b: Dim) -> Dim:
    """Return 1 if ``a == b``, else 0."""
    if isinstance(a, int) and isinstance(b, int):
        return int(a == b)
    if a == b:
        return 1
    low, high = _difference_bounds(a, b)
    if (low is not None and low > 0) or (high is not None and high < 0):
        return 0
    return operation(ExprOp.EQ, *_ordered(a, b))


def ne(a: Dim, b: Dim) -> Dim:
    """Return 1 if ``a != b``, else 0."""
    same = eq(a, b)
    return 1 - same if isinstance(same, int) else operation(ExprOp.NE, *_ordered(a, b))


def lt(a: Dim, b: Dim) -> Dim:
    """Return 1 if ``a < b``, else 0."""
    if isinstance(a, int) and isinstance(b, int):
        return int(a < b)
    low, high = _difference_bounds(a, b)
    if high is not None and high < 0:
        return 1
    if low is not None and low >= 0:
        return 0
    return operation(ExprOp.LT, a, b)


def le(a: Dim, b: Dim) -> Dim:
    """Return 1 if ``a <= b``, else 0."""
    if isinstance(a, int) and isinstance(b, int):
        return int(a <= b)
    low, high = _difference_bounds(a, b)
    if high is not None and high <= 0:
        return 1
    if low is not None and low > 0:
        return 0
    return operation(ExprOp.LE, a, b)


def truth(condition: Dim) -> bool | None:
    """Return True if ``condition`` is provably nonzero for all sizes, False if it is provably 0, else None."""
    if isinstance(condition, int):
        return condition != 0
    low, high = condition.bounds
    return True if (low is not None and low > 0) or (high is not None and high < 0) else None


def logical_and(a: Dim, b: Dim) -> Dim:
    """Return 1 if a and b are nonzero, else 0."""
    truth_a, truth_b = truth(a), truth(b)
    if truth_a is False or truth_b is False:
        return 0
    if truth_a:
        return 1 if truth_b else ne(b, 0) if not _is_boolean(b) else b
    if truth_b or a == b:
        return a if _is_boolean(a) else ne(a, 0)
    return operation(ExprOp.AND, *_ordered(a, b))


def logical_or(a: Dim, b: Dim) -> Dim:
    """Return 1 if a or b is nonzero, else 0."""
    truth_a, truth_b = truth(a), truth(b)
    if truth_a or truth_b:
        return 1
    if truth_a is False:
        return 0 if truth_b is False else b if _is_boolean(b) else ne(b, 0)
    if truth_b is False or a == b:
        return a if _is_boolean(a) else ne(a, 0)
    return operation(ExprOp.OR, *_ordered(a, b))


def logical_not(a: Dim) -> Dim:
    """Return 1 if a is 0, else 0."""
    atom = single_atom(a)
    if atom is not None:
        if atom.op is ExprOp.EQ:
            return ne(*atom.args)
        if atom.op is ExprOp.NE:
            return eq(*atom.args)
        if atom.op is ExprOp.LT:
            return le(atom.args[1], atom.args[0])
        if atom.op is ExprOp.LE:
            return lt(atom.args[1], atom.args[0])
    return eq(a, 0)


def _is_boolean(dim: Dim) -> bool:
    atom = single_atom(dim)
    return atom is not None and atom.op in boolean_ops if not isinstance(dim, int) else dim in (0, 1)


def select(condition: Dim, a: Dim, b: Dim) -> Dim:
    """Return ``a`` if ``condition`` is nonzero, else ``b``.

    A Run evaluates both operands, so neither may divide by zero.
    """
    known = truth(condition)
    if known is not None:
        return a if known else b
    if a == b:
        return a
    atom = single_atom(condition)
    if atom is not None and atom.op is ExprOp.EQ and (a, b) in (atom.args, atom.args[::-1]):
        return b  # the condition is a == b: where it holds, a equals b, so the result is always b
    return operation(ExprOp.SELECT, condition, a, b)


def product(dims: Iterable[Dim]) -> Dim:
    result: Dim = 1
    for dim in dims:
        result = result * dim
    return result
