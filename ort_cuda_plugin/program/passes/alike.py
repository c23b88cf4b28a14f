"""What makes one step of several that multiply one tensor with different weights: equal expressions, joined constants.

The results of such steps lie side by side along one axis, that of ``columns``.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...model.recipes import Recipe
from ..scalar import Scalar
from ..shapes import broadcast_strides
from ..steps import Input, Sums
from ..symbolic import Dim
from ..tensor import Buffer, BufferKind, Tensor


def same_leaves(step: Sums, other: Sums, columns: int) -> dict[Scalar, Scalar] | None:
    """The leaves of ``other`` for those of ``step`` where both do the same with their sums, else None.

    This looks at the first output of each. What they read beside the sums is the same for all columns and for both, or
    constant and different along columns.
    """
    if _beside(step.shape, columns) != _beside(other.shape, columns):
        return None
    pairs: dict[Scalar, Scalar] = {}
    stack = [(step.outputs[0][0], other.outputs[0][0])]
    while stack:
        one, two = stack.pop()
        if one in pairs:
            if pairs[one] is not two:
                return None
            continue
        if (one.op, one.dtype, one.value, len(one.operands)) != (two.op, two.dtype, two.value, len(two.operands)):
            return None
        if (one is step.total) != (two is other.total):
            return None
        pairs[one] = two
        stack += zip(one.operands, two.operands, strict=True)
    theirs = dict(other.inputs)
    for leaf, x in step.inputs:
        y_leaf = pairs.get(leaf)
        if y_leaf is None or y_leaf not in theirs or not _are_alike(step, x, other, theirs[y_leaf], columns):
            return None
    return pairs


def _beside(shape: Sequence[Dim], columns: int) -> tuple[Dim, ...]:
    return tuple(dim for axis, dim in enumerate(shape) if axis != columns % len(shape))


def _are_alike(step: Sums, x: Tensor, other: Sums, y: Tensor, columns: int) -> bool:
    if x.dtype is not y.dtype:
        return False
    if _is_row_of_constants(step, x, columns):
        return _is_row_of_constants(other, y, columns)
    strides = broadcast_strides(x, step.shape)
    same = x.buffer is y.buffer and x.offset == y.offset and strides == broadcast_strides(y, other.shape)
    return same and strides[columns] == 0


def _is_row_of_constants(step: Sums, x: Tensor, columns: int) -> bool:
    """Whether x is constant and has an element for each column, the same wherever else the result goes on."""
    strides = broadcast_strides(x, step.shape)
    beside = zip(_beside(step.shape, columns), _beside(strides, columns), strict=True)
    return x.is_constant and strides[columns] == 1 and all(dim == 1 or stride == 0 for dim, stride in beside)


def joined_inputs(first: Sums, others: Sequence[Sums], columns: int, shape: tuple[Dim, ...]) -> tuple[Input, ...]:
    """What the step of all columns, whose result has ``shape``, reads beside its operands.

    ``others`` are steps for which `same_leaves` has leaves.
    """
    matches = [(other, same_leaves(first, other, columns), dict(other.inputs)) for other in others]
    inputs: list[Input] = []
    for leaf, x in first.inputs:
        if _is_row_of_constants(first, x, columns):
            rows = [_row(first, x, columns)]
            for other, pairs, theirs in matches:
                assert pairs is not None
                rows.append(_row(other, theirs[pairs[leaf]], columns))
            row = joined_constant(rows, axis=0)
            behind = len(shape) - 1 - columns % len(shape)
            x = Tensor(x.dtype, (*row.shape, *[1] * behind), row.buffer, strides=(1, *[0] * behind))
        else:
            x = Tensor(x.dtype, shape, x.buffer, strides=broadcast_strides(x, first.shape), offset=x.offset)
        inputs.append((leaf, x))
    return tuple(inputs)


def _row(step: Sums, x: Tensor, columns: int) -> Tensor:
    return Tensor(x.dtype, (step.shape[columns],), x.buffer, strides=(1,), offset=x.offset)


def joined_constant(tensors: Sequence[Tensor], axis: int) -> Tensor:
    """A constant of the contents of constants, one after the other along ``axis``; read when a plan needs it."""
    shape = list(tensors[0].static_shape)
    shape[axis] = sum(x.static_shape[axis] for x in tensors)
    recipe = Recipe("join", tuple(x.constant_view() for x in tensors), (axis,))
    constant = recipe.constant(tensors[0].dtype, tuple(shape))
    return Tensor(constant.dtype, constant.shape, Buffer(BufferKind.WEIGHT, constant.nbytes, data=constant))
