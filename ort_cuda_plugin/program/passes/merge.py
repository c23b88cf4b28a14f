"""Makes one product of several that multiply one tensor with different weights, as queries, keys and values do."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from dataclasses import replace

from ...model.recipes import Recipe
from ..scalar import Scalar
from ..shapes import broadcast_strides
from ..steps import Contract, Input, Map, dense
from ..symbolic import Dim
from ..tensor import Buffer, BufferKind, Tensor, contiguous_strides
from ..trace import Step
from .place import Copy, with_view
from .uses import Uses


def merge(steps: Sequence[Step]) -> list[Step]:
    """The steps with one product in place of those that differ in their weights only; their results become views."""
    result: list[Step] = list(steps)
    groups: dict[Hashable, list[int]] = {}
    for position, step in enumerate(result):
        if isinstance(step, Contract) and not step.is_converted and _is_mergeable(step):
            groups.setdefault(_operand_key(step), []).append(position)
    uses = Uses(enumerate(result))
    gone: set[int] = set()
    for positions in groups.values():
        while len(positions) > 1:
            first, *others = positions
            alike = [first, *(other for other in others if _leaves(result[first], result[other]) is not None)]
            positions = [position for position in positions if position not in alike]
            if len(alike) > 1 and _merge(result, alike, uses):
                gone.update(alike[1:])
    return [step for position, step in enumerate(result) if position not in gone]


def _is_mergeable(step: Contract) -> bool:
    """Whether the weights are constant, and the only result is an intermediate."""
    if len(step.outputs) != 1 or step.b.rank != 2 or not step.b.is_constant or step.column_axes != 1:
        return False
    y = step.outputs[0][1]
    return dense(y) and y.buffer.kind is BufferKind.SCRATCH and isinstance(step.shape[-1], int)


def _operand_key(step: Contract) -> Hashable:
    a, b = step.a, step.b
    return a.buffer, a.dtype, a.shape, a.strides, a.offset, b.shape[0], step.outputs[0][1].dtype


def _merge(steps: list[Step], positions: Sequence[int], uses: Uses[int]) -> bool:
    products = [step for step in (steps[position] for position in positions) if isinstance(step, Contract)]
    first, *others = products
    if any(writer > positions[0] for writer in uses.writers(first.a.buffer)):
        return False
    width = sum(operator.index(step.shape[-1]) for step in products)
    shape: tuple[Dim, ...] = (*first.shape[:-1], width)
    result = first.outputs[0][1]
    nbytes = result.buffer.nbytes * width // operator.index(first.shape[-1])
    joined = Tensor(result.dtype, shape, Buffer(BufferKind.SCRATCH, nbytes))
    copies = []
    offset = 0
    for step in products:
        target = Tensor(result.dtype, step.shape, joined.buffer, strides=contiguous_strides(shape), offset=offset)
        copies.append(Copy(0, step.outputs[0][1], target))
        offset += operator.index(step.shape[-1])
    changed: dict[int, Step] = {}
    for copy in copies:
        for user in uses.users(copy.source.buffer):
            if user in positions:
                continue
            viewed = with_view(changed.get(user, steps[user]), copy)
            if viewed is None:
                return False
            changed[user] = viewed
    inputs = _joined_inputs(first, others, shape)
    merged = replace(
        first,
        nodes=tuple(dict.fromkeys(node for step in products for node in step.nodes)),
        shape=shape,
        operands=(first.a, _joined([step.b for step in products], axis=1)),
        inputs=inputs,
        outputs=((first.outputs[0][0], joined),),
    )
    for position in positions:
        uses.leave(position, steps[position])
    changed[positions[0]] = merged
    for user, new in changed.items():
        if user not in positions:
            uses.leave(user, steps[user])
        uses.enter(user, new)
        steps[user] = new
    return True


def _leaves(step: Step, other: Step) -> dict[Scalar, Scalar] | None:
    """The leaves of ``other`` for those of ``step`` where both do the same with their sums, else None.

    What they read beside the sums is the same for all columns and for both, or constant and different along columns.
    """
    assert isinstance(step, Contract)
    assert isinstance(other, Contract)
    if step.shape[:-1] != other.shape[:-1]:
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
        if y_leaf is None or y_leaf not in theirs or not _are_alike(step, x, other, theirs[y_leaf]):
            return None
    return pairs


def _are_alike(step: Contract, x: Tensor, other: Contract, y: Tensor) -> bool:
    if x.dtype is not y.dtype:
        return False
    if _is_row_of_constants(step, x):
        return _is_row_of_constants(other, y)
    strides = broadcast_strides(x, step.shape)
    same = x.buffer is y.buffer and x.offset == y.offset and strides == broadcast_strides(y, other.shape)
    return same and strides[-1] == 0


def _is_row_of_constants(step: Contract, x: Tensor) -> bool:
    """Whether x is constant and has an element for each column, the same in all rows."""
    strides = broadcast_strides(x, step.shape)
    return x.is_constant and strides[-1] == 1 and all(stride == 0 for stride in strides[:-1])


def _joined_inputs(first: Contract, others: Sequence[Contract], shape: tuple[Dim, ...]) -> tuple[Input, ...]:
    matches = [(other, _leaves(first, other), dict(other.inputs)) for other in others]
    inputs: list[Input] = []
    for leaf, x in first.inputs:
        if _is_row_of_constants(first, x):
            rows = [_row(first, x)]
            for other, pairs, theirs in matches:
                assert pairs is not None
                rows.append(_row(other, theirs[pairs[leaf]]))
            x = _joined(rows, axis=0)
        else:
            x = Tensor(x.dtype, shape, x.buffer, strides=broadcast_strides(x, first.shape), offset=x.offset)
        inputs.append((leaf, x))
    return tuple(inputs)


def _row(step: Map, x: Tensor) -> Tensor:
    return Tensor(x.dtype, step.shape[-1:], x.buffer, strides=(1,), offset=x.offset)


def _joined(tensors: Sequence[Tensor], axis: int) -> Tensor:
    """A constant of the contents of constants, one after the other along ``axis``; read when a plan needs it."""
    shape = list(tensors[0].static_shape)
    shape[axis] = sum(x.static_shape[axis] for x in tensors)
    recipe = Recipe("join", tuple(x.constant_view() for x in tensors), (axis,))
    constant = recipe.constant(tensors[0].dtype, tuple(shape))
    return Tensor(constant.dtype, constant.shape, Buffer(BufferKind.WEIGHT, constant.nbytes, data=constant))
