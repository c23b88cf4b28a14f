"""Symbolic integers: polynomials in canonical form, with integer coefficients, over symbols and opaque operations.

A `Dim` is a plain int or an `Expr`; a constant expression becomes an int. ``a == b`` compares canonical forms, so True
means *provably* equal for all sizes. ``a < b`` raises TypeError. The functions `lt`, `eq`, ... return a Dim that has
the value 0 or 1 in each Run; it becomes an int if the result is the same for all sizes.

The operations, and their results for negative numbers, are those of ``ocp_plan_expr`` in ``csrc_shim/plan/format.h``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from .operations import ExprOp
from .polynomial import READ_BACK as READ_BACK
from .polynomial import Atom as Atom
from .polynomial import Bounds as Bounds
from .polynomial import Dim as Dim
from .polynomial import Expr as Expr
from .polynomial import Monomial as Monomial
from .polynomial import boolean_ops, both, operation, tighter
from .polynomial import bounds as bounds
from .polynomial import ceildiv as ceildiv
from .polynomial import divides as divides
from .polynomial import evaluators as evaluators
from .polynomial import floordiv as floordiv
from .polynomial import hint as hint
from .polynomial import is_const as is_const
from .polynomial import is_read_back as is_read_back
from .polynomial import mod as mod
from .polynomial import single_atom as single_atom
from .polynomial import symbol as symbol
from .polynomial import truncdiv as truncdiv


def _difference_bounds(a: Dim, b: Dim) -> Bounds:
    """Return bounds of ``a - b``: the tighter of the polynomial's bounds and those that the bounds of a and b imply."""
    low, high = bounds(a - b)
    (a_low, a_high), (b_low, b_high) = bounds(a), bounds(b)
    apart = both(int.__sub__, a_low, b_high), both(int.__sub__, a_high, b_low)
    return tighter(max, low, apart[0]), tighter(min, high, apart[1])


def _ordered(a: Dim, b: Dim) -> tuple[Dim, Dim]:
    """Return the arguments of a commutative operation in a canonical order."""
    return (b, a) if hash(a) > hash(b) else (a, b)


def sym_min(a: Dim, b: Dim) -> Dim:
    return _extreme(ExprOp.MIN, a, b)


def sym_max(a: Dim, b: Dim) -> Dim:
    return _extreme(ExprOp.MAX, a, b)


def _extreme(op: ExprOp, a: Dim, b: Dim) -> Dim:
    """Return the minimum or maximum. It simplifies ``min(min(a, b), b) = min(a, b)`` and ``min(max(a, b), b) = b``."""
    if isinstance(a, int) and isinstance(b, int):
        return evaluators[op](a, b)
    low, high = _difference_bounds(a, b)
    if_less, if_more = (a, b) if op is ExprOp.MIN else (b, a)
    if high is not None and high <= 0:
        return if_less
    if low is not None and low >= 0:
        return if_more
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
    return _less(ExprOp.LT, a, b, 0)


def le(a: Dim, b: Dim) -> Dim:
    """Return 1 if ``a <= b``, else 0."""
    return _less(ExprOp.LE, a, b, 1)


def _less(op: ExprOp, a: Dim, b: Dim, end: int) -> Dim:
    """Return 1 if ``a - b < end``, else 0."""
    if isinstance(a, int) and isinstance(b, int):
        return evaluators[op](a, b)
    low, high = _difference_bounds(a, b)
    if high is not None and high < end:
        return 1
    if low is not None and low >= end:
        return 0
    return operation(op, a, b)


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
        return 1 if truth_b else _as_boolean(b)
    return _as_boolean(a) if truth_b or a == b else operation(ExprOp.AND, *_ordered(a, b))


def logical_or(a: Dim, b: Dim) -> Dim:
    """Return 1 if a or b is nonzero, else 0."""
    truth_a, truth_b = truth(a), truth(b)
    if truth_a or truth_b:
        return 1
    if truth_a is False:
        return 0 if truth_b is False else _as_boolean(b)
    return _as_boolean(a) if truth_b is False or a == b else operation(ExprOp.OR, *_ordered(a, b))


_negations: Mapping[ExprOp, Callable[[Dim, Dim], Dim]] = {
    ExprOp.EQ: ne,
    ExprOp.NE: eq,
    ExprOp.LT: lambda a, b: le(b, a),
    ExprOp.LE: lambda a, b: lt(b, a),
}


def logical_not(a: Dim) -> Dim:
    """Return 1 if a is 0, else 0."""
    atom = single_atom(a)
    negation = None if atom is None or atom.op is None else _negations.get(atom.op)
    return eq(a, 0) if atom is None or negation is None else negation(*atom.args)


def _as_boolean(dim: Dim) -> Dim:
    atom = single_atom(dim)
    is_boolean = dim in (0, 1) if isinstance(dim, int) else atom is not None and atom.op in boolean_ops
    return dim if is_boolean else ne(dim, 0)


def select(condition: Dim, a: Dim, b: Dim) -> Dim:
    """Return ``a`` if ``condition`` is nonzero, else ``b``. A Run evaluates both, so neither may divide by zero."""
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
