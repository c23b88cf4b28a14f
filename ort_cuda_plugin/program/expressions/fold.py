"""Evaluation of scalar expressions on symbolic integers, so that shape arithmetic needs no launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from . import symbolic
from .scalar import Scalar, operands_first
from .symbolic import Dim

Handler = Callable[[Scalar, Sequence[Dim]], Dim]
"""Computes an operation from its expression and the values of its operands."""


class NotFoldable(Exception):
    """The expression has an operation or type that symbolic integers lack, or a value beyond 64-bit integers."""


_operations: Mapping[str, Callable[..., Dim]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "neg": lambda a: 0 - a,
    "truncdiv": symbolic.truncdiv,
    "truncmod": lambda a, b: a - symbolic.truncdiv(a, b) * b,
    "min": symbolic.sym_min,
    "max": symbolic.sym_max,
    "abs": lambda a: symbolic.sym_max(a, 0 - a),
    "eq": symbolic.eq,
    "ne": symbolic.ne,
    "lt": symbolic.lt,
    "le": symbolic.le,
    "gt": lambda a, b: symbolic.lt(b, a),
    "ge": lambda a, b: symbolic.le(b, a),
    "where": symbolic.select,
}
_booleans: Mapping[str, Callable[..., Dim]] = {
    "and": symbolic.logical_and,
    "or": symbolic.logical_or,
    "xor": symbolic.ne,
    "not": symbolic.logical_not,
}


def fold(x: Scalar, leaves: Mapping[Scalar, Dim], handlers: Mapping[str, Handler] = {}) -> Dim:
    """Return the value of x as a symbolic integer, with booleans as 0 and 1. ``leaves`` maps leaves to values.

    ``handlers`` compute further operations, such as loads, from the expression and the values of its operands. Values
    are assumed to fit the types in x. Raises NotFoldable for floats and for operations that symbolic integers lack,
    ZeroDivisionError for a constant divisor of 0.
    """
    known = dict(leaves)
    for part in operands_first([x], leaves):
        operands = [known[operand] for operand in part.operands]
        handler = handlers.get(part.op)
        known[part] = _folded(part, operands) if handler is None else handler(part, operands)
    return known[x]


def _folded(x: Scalar, operands: Sequence[Dim]) -> Dim:
    if x.dtype.is_float:
        raise NotFoldable
    if x.op == "constant":
        return int(x.value)
    if x.op == "cast":
        return symbolic.ne(operands[0], 0) if not x.dtype.is_integer else operands[0]
    table = _operations if x.dtype.is_integer or x.op in _operations else _booleans
    if x.op not in table:
        raise NotFoldable
    return table[x.op](*operands)
