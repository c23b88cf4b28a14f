"""Bounds on the magnitude of each tensor as numbers, which lowering can compare with the range of float16.

`range_analysis` derives a bound for each column, as steps that the device computes, for scales of stored tensors.
Lowering instead needs one number for each tensor while it records the steps: does the result of a node exceed 65504?
Both use the facts of `bounded_patterns`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...kernels.codegen.source import constant_number
from ...model.ir import DType
from ...program.expressions.scalar import Scalar, operands_first
from ...program.expressions.symbolic import product
from ...program.steps.row_program import MAX, MIN, SUM
from ...program.steps.steps import Contract, Convolve, Map, Rows
from ...program.steps.tensor import Buffer, Tensor
from ...program.steps.trace import Copy, Memset, Step
from .bounded_patterns import OF_UNIT, ROUNDING, BoundedPatterns, uncast

__all__ = ["MagnitudeBounds"]

_LARGEST_EXPONENT = 700.0
"""Maximum argument of exp whose result is certain to fit float64."""
_FLOATS = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64)


class MagnitudeBounds:
    """Bounds that hold for any input: they follow from weights, normalizations and activations. `note` gets each step
    in program order.
    """

    def __init__(self) -> None:
        self._known: dict[Buffer, float] = {}
        self._written: set[Buffer] = set()

    def of(self, x: Tensor) -> float | None:
        """Return a bound of the magnitude of x's elements; None if none is known. Reads the contents of a constant."""
        if x.dtype not in _FLOATS:
            return None
        if x.is_constant:
            return _largest(_floats(x))
        return self._known.get(x.buffer)

    def note(self, step: Step) -> None:
        """Derive the bounds of the step's results. A buffer that several steps write has the largest of their bounds,
        and none if one of these is unknown.
        """
        if isinstance(step, Copy):
            self._write(step.destination.buffer, self.of(step.source), step)
        elif isinstance(step, Memset):
            self._write(step.destination.buffer, 0.0 if step.byte == 0 else None, step)
        elif type(step) in (Map, Rows, Contract, Convolve):
            assert isinstance(step, Map)
            outputs = step.all_outputs
            bounds = self._expressions(step, [value for value, _ in outputs])
            for (_, y), bound in zip(outputs, bounds, strict=True):
                self._write(y.buffer, bound, step)
        else:
            for buffer in step.writes:
                self._write(buffer, None, step)

    def _write(self, buffer: Buffer, bound: float | None, step: Step) -> None:
        is_first = buffer not in self._written
        self._written.add(buffer)
        known = 0.0 if is_first else self._known.get(buffer)
        if bound is None or known is None or not math.isfinite(bound):
            self._known.pop(buffer, None)
        else:
            self._known[buffer] = max(bound, known)

    def _expressions(self, step: Map, values: Sequence[Scalar]) -> list[float | None]:
        """Return the bound of each of a step's expressions, None for an unknown one."""
        length = product(step.shape[axis] for axis in step.axes) if isinstance(step, Rows) else 0
        numbers = {leaf: float(number) for leaf, x in step.inputs if (number := constant_number(x)) is not None}
        patterns = BoundedPatterns(numbers, length if isinstance(length, int) else 0)
        known: dict[Scalar, float | None] = {leaf: self.of(x) for leaf, x in step.inputs}
        if isinstance(step, Contract | Convolve):
            known[step.total] = self._of_accumulators(step)
        for x in operands_first(values, known):
            known[x] = _bound(x, [known[operand] for operand in x.operands], patterns)
        return [None if (bound := known[value]) is None else bound * ROUNDING for value in values]

    def _of_accumulators(self, step: Contract | Convolve) -> float | None:
        if step.is_converted or (isinstance(step, Contract) and step.low_rank is not None):
            return None
        a, b = step.operands
        limits = self.of(a), self.of(b)
        if limits[0] is None or limits[1] is None:
            return None
        if isinstance(step, Convolve):
            if not b.is_constant:
                return None
            of_channel = (0, *range(2, b.rank)) if step.transposed else tuple(range(1, b.rank))
            return limits[0] * _largest(np.abs(_floats(b)).sum(of_channel, np.float64))
        if b.is_constant:
            return limits[0] * _largest(np.abs(_floats(b)).sum(-2, np.float64))
        if a.is_constant:
            return limits[1] * _largest(np.abs(_floats(a)).sum(-1, np.float64))
        depth = a.shape[-1]
        return depth * limits[0] * limits[1] if isinstance(depth, int) else None


def _bound(x: Scalar, operands: Sequence[float | None], patterns: BoundedPatterns) -> float | None:
    """Return a bound of x, given those of its operands; None if none can be derived."""
    if x.op == "constant":
        return abs(float(x.value)) if math.isfinite(x.value) else None
    if x.op in OF_UNIT or _is_softmax(x):
        return 1.0
    if x.op == "count":
        return float(patterns.row_length) or None
    if x.op == "cast" and x.operands[0].dtype is DType.BOOL:
        return 1.0
    if patterns.is_normalized(x):
        return math.sqrt(patterns.row_length)
    if x.op == "div":
        return _quotient(x, operands[0], patterns)
    if x.op == "reduced":
        return _reduced(x, operands, patterns)
    given = operands[1:] if x.op == "where" else operands
    if not given or any(bound is None for bound in given):
        return None
    return _combined(x, [bound for bound in given if bound is not None], patterns)


def _combined(x: Scalar, given: Sequence[float], patterns: BoundedPatterns) -> float | None:
    """Return a bound of an operation whose operands all have bounds; None if the result may still have none."""
    first = given[0]
    if x.op in ("neg", "abs", "cast"):
        return first
    if x.op in ("add", "sub"):
        return sum(given)
    if x.op == "mul":
        return math.prod(given)
    if x.op in ("min", "max", "where"):
        return max(given)
    if x.op == "sqrt":
        return math.sqrt(first)
    if x.op == "exp":
        return math.exp(first) if first <= _LARGEST_EXPONENT else None
    exponent = patterns.number(x.operands[1]) if x.op == "pow" else None
    if exponent is not None and 0 <= exponent <= 4:
        return float(max(first, 1.0) ** exponent)
    return None


def _quotient(x: Scalar, numerator: float | None, patterns: BoundedPatterns) -> float | None:
    divisor = uncast(x.operands[1])
    if numerator is None:
        return None
    if patterns.is_above_one(divisor):
        return numerator
    number = float(patterns.row_length) if divisor.op == "count" else patterns.number(divisor)
    return numerator / abs(number) if number else None


def _reduced(x: Scalar, operands: Sequence[float | None], patterns: BoundedPatterns) -> float | None:
    stage, _ = x.value
    if len(operands) != 1 or operands[0] is None or not patterns.row_length:
        return None
    if stage.reduction is SUM:
        return operands[0] * patterns.row_length
    is_selection = stage.reduction is MAX or stage.reduction is MIN
    return operands[0] if is_selection else None


def _is_softmax(x: Scalar) -> bool:
    """Return whether x is an exponential divided by the sum of its row's exponentials."""
    if x.op != "div":
        return False
    numerator, divisor = map(uncast, x.operands)
    if numerator.op != "exp" or divisor.op != "reduced" or divisor.value[0].reduction is not SUM:
        return False
    return uncast(divisor.value[0].elements[0]) is numerator


def _floats(x: Tensor) -> np.ndarray[Any, Any]:
    """Return the contents of a constant of floats as float32 or float64."""
    array = x.constant
    assert array is not None
    if x.dtype is DType.BFLOAT16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array if x.dtype is DType.FLOAT64 else array.astype(np.float32, copy=False)


def _largest(array: np.ndarray[Any, Any]) -> float:
    return float(np.abs(array).max(initial=0.0))
