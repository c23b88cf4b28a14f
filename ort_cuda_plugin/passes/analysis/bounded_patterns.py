"""Expressions whose magnitude is bounded whatever their inputs are, for value range analysis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...program.expressions.scalar import Scalar
from ...program.steps.row_program import SUM

__all__ = ["OF_UNIT", "ROUNDING", "BoundedPatterns", "uncast"]

OF_UNIT = frozenset({"erf", "half_erf", "tanh", "sigmoid"})
"""Operations whose results have a magnitude of at most 1."""
ROUNDING = 1.001
"""Factor by which each bound is increased, to cover the rounding errors of additions and divisions."""


@dataclass(frozen=True)
class BoundedPatterns:
    """Recognizes bounded expressions of a step. ``numbers`` has the values of constant leaves; ``row_length`` is the
    number of elements of a row, 0 if it is unknown or the step has no rows.
    """

    numbers: Mapping[Scalar, float]
    row_length: int

    def number(self, x: Scalar) -> float | None:
        """Return the value of x if x is a constant, else None."""
        return float(x.value) if x.op == "constant" else self.numbers.get(x)

    def is_above_one(self, x: Scalar) -> bool:
        """Return whether x has the form ``1 + exp(...)``."""
        x = uncast(x)
        if x.op != "add":
            return False
        pairs = (x.operands, x.operands[::-1])
        return any(self.number(one) == 1.0 and uncast(other).op == "exp" for one, other in pairs)

    def is_normalized(self, x: Scalar) -> bool:
        """Return whether x is an element divided by its row's root mean square; an epsilon may be added."""
        if not self.row_length or x.op not in ("mul", "div"):
            return False
        first, second = map(uncast, x.operands)
        if x.op == "div":
            return second.op == "sqrt" and self._is_mean_of_squares(second.operands[0], first)
        for value, factor in ((first, second), (second, first)):
            if factor.op == "div" and self.number(factor.operands[0]) == 1.0:
                root = uncast(factor.operands[1])
                if root.op == "sqrt" and self._is_mean_of_squares(root.operands[0], value):
                    return True
        return False

    def _is_mean_of_squares(self, x: Scalar, value: Scalar) -> bool:
        x = uncast(x)
        if x.op == "add":
            x, addend = map(uncast, x.operands)
            number = self.number(addend)
            if number is None or not number >= 0:
                return False
        if x.op != "div":
            return False
        total, count = map(uncast, x.operands)
        if count.op != "count" and self.number(count) != self.row_length:
            return False
        if total.op != "reduced" or total.value[0].reduction is not SUM:
            return False
        square = uncast(total.value[0].elements[0])
        if square.op == "pow" and self.number(square.operands[1]) == 2.0:
            return uncast(square.operands[0]) is value
        return square.op == "mul" and all(uncast(operand) is value for operand in square.operands)


def uncast(x: Scalar) -> Scalar:
    """Return x without the casts around it, which bounds ignore."""
    while x.op == "cast" and (x.operands[0].dtype.is_float or x.operands[0].op == "count"):
        (x,) = x.operands
    return x
