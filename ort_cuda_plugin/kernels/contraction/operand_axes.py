"""Broadcast of vectors along an axis of an operand (scales, zero points, column sums) over a contraction's result."""

from __future__ import annotations

from collections.abc import Sequence

from ...program.expressions.symbolic import Dim
from ...program.lowering.context import Tensor
from ...program.steps.steps import Contract, Convolve, Sums
from ...program.steps.tensor import contiguous_strides


def axes_of_elements(x: Tensor) -> set[int]:
    """Return the axes along which x is not broadcast: size not 1, stride not 0."""
    return {axis for axis, (dim, stride) in enumerate(zip(x.shape, x.strides, strict=True)) if dim != 1 and stride != 0}


def weights_axis(step: Sums) -> int:
    """Return the axis of the weights (second operand) that the result has, too: output channels, or GEMM columns."""
    return 0 if isinstance(step, Convolve) else step.operands[1].rank - 1


def over_result(step: Sums, number: int, y: Tensor) -> Tensor:
    """Return a view of y, a vector along one axis of operand ``number`` (0 or 1), that broadcasts to the result."""
    axes = axes_of_elements(y)
    if not axes:
        return Tensor(y.dtype, (), y.buffer, offset=y.offset)
    (axis,) = axes
    own = _own_axes(step, number)
    strides: list[Dim] = [0] * len(step.shape)
    for own_axis, stride in zip(own, contiguous_strides([step.shape[own_axis] for own_axis in own]), strict=True):
        strides[own_axis] = stride * y.strides[axis]
    shape = [dim if own_axis in own else 1 for own_axis, dim in enumerate(step.shape)]
    return Tensor(y.dtype, shape, y.buffer, strides=strides, offset=y.offset)


def _own_axes(step: Sums, number: int) -> Sequence[int]:
    """Return the axes of the result, except batch axes, that come from operand ``number`` (0 or 1)."""
    if isinstance(step, Convolve):
        return step.channels
    assert isinstance(step, Contract)
    rank, columns = len(step.shape), step.column_axes
    return range(rank - columns, rank) if number else range(rank - columns - step.row_axes, rank - columns)
