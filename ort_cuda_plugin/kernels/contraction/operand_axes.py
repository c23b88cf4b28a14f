"""Vectors along a dimension of an operand of sums, as tensors over the dimensions of the result."""

from __future__ import annotations

from collections.abc import Sequence

from ...program.expressions.symbolic import Dim
from ...program.lowering.context import Tensor
from ...program.steps.steps import Contract, Convolve, Sums
from ...program.steps.tensor import contiguous_strides

__all__ = ["axes_of_elements", "over_result"]


def axes_of_elements(x: Tensor) -> set[int]:
    """The dimensions along which x has elements."""
    return {axis for axis, (dim, stride) in enumerate(zip(x.shape, x.strides, strict=True)) if dim != 1 and stride != 0}


def over_result(step: Sums, number: int, y: Tensor) -> Tensor:
    """y, which has elements along one dimension of an operand, over those of the result that the operand has."""
    axes = axes_of_elements(y)
    if not axes:
        return Tensor(y.dtype, (), y.buffer, offset=y.offset)
    (axis,) = axes
    own = _own_axes(step, number)
    strides: list[Dim] = [0] * len(step.shape)
    for place, stride in zip(own, contiguous_strides([step.shape[place] for place in own]), strict=True):
        strides[place] = stride * y.strides[axis]
    shape = [dim if place in own else 1 for place, dim in enumerate(step.shape)]
    return Tensor(y.dtype, shape, y.buffer, strides=strides, offset=y.offset)


def _own_axes(step: Sums, number: int) -> Sequence[int]:
    """The dimensions of the result that are the first operand's, or the second's, beside those of batches."""
    if isinstance(step, Convolve):
        return step.channels
    assert isinstance(step, Contract)
    rank, columns = len(step.shape), step.column_axes
    return range(rank - columns, rank) if number else range(rank - columns - step.row_axes, rank - columns)
