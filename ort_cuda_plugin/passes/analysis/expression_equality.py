"""Structural comparison for horizontal fusion: epilogues and prologues of contractions that differ only in constants.

The contractions (GEMMs or convolutions) share an input. Their results are concatenated along the axis that this module
calls ``columns``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...model.ir import Recipe
from ...model.recipes import derived_constant
from ...program.expressions.scalar import Scalar, reachable
from ...program.expressions.symbolic import Dim
from ...program.lowering.shapes import broadcast_strides
from ...program.steps.steps import Conversion, Input, Sums
from ...program.steps.tensor import Buffer, BufferKind, Tensor

NEUTRAL = {"add": -0.0, "mul": 1.0}
"""Neutral element of each operation: an operand that leaves every number unchanged, including signed zeros."""
LONGEST = 8
"""Maximum operations of an epilogue that is padded with neutral operations to match another one."""


@dataclass(frozen=True)
class Expression:
    """An elementwise expression ``value`` over ``shape``. Its leaves are ``own`` and the leaves of ``inputs``.

    ``own`` is the accumulator in an epilogue, and the loaded element in a prologue.
    """

    value: Scalar
    own: Scalar
    inputs: tuple[Input, ...]
    shape: tuple[Dim, ...]


def result_of(step: Sums) -> Expression:
    """Return the epilogue of the step's first output; its ``own`` leaf is the accumulator."""
    return Expression(step.outputs[0][0], step.total, step.inputs, step.shape)


def converted_by(conversion: Conversion, x: Tensor) -> Expression:
    """Return the prologue of operand x as an expression; its ``own`` leaf is the element of x."""
    return Expression(conversion.value, conversion.leaf, conversion.inputs, x.shape)


def same_leaves(
    first: Expression, other: Expression, columns: int | None, *, spreads: bool = False
) -> dict[Scalar, Scalar] | None:
    """Map the leaves of ``first`` to those of ``other`` if both apply the same operations to their ``own`` leaf, else
    None.

    Each further leaf of ``first`` must match its counterpart in one of two ways. Either both read equal elements that
    do not vary along ``columns``, or both are constants with one element per column. With ``spreads``, such a constant
    may also have a single element for all columns. ``columns`` is the axis of concatenation; None if the results are
    not concatenated.
    """
    if _beside(first.shape, columns) != _beside(other.shape, columns):
        return None
    pairs = _pairs(first, other)
    if pairs is None:
        return None
    theirs = dict(other.inputs)
    for leaf, x in first.inputs:
        y_leaf = pairs.get(leaf)
        if (
            y_leaf is None
            or y_leaf not in theirs
            or not _are_matching(first, x, other, theirs[y_leaf], columns, spreads)
        ):
            return None
    return pairs


def are_equal(value: Scalar, other: Scalar, tensors: Mapping[Scalar, Tensor]) -> bool:
    """Return whether two expressions of one step have equal values; ``tensors`` maps their leaves to the tensors they
    load.
    """
    stack, seen = [(value, other)], set()
    while stack:
        one, two = pair = stack.pop()
        if one is two or pair in seen:
            continue
        seen.add(pair)
        if one in tensors or two in tensors:
            x, y = tensors.get(one), tensors.get(two)
            if x is None or y is None or x.shape != y.shape or not _same_elements(x, y):
                return False
        elif not _same_operation(one, two) or one.op == "leaf":
            return False
        else:
            stack += zip(one.operands, two.operands, strict=True)
    return True


def _pairs(first: Expression, other: Expression) -> dict[Scalar, Scalar] | None:
    """Map the nodes of expression ``first`` to those of ``other``; None if the operations differ."""
    pairs: dict[Scalar, Scalar] = {}
    stack = [(first.value, other.value)]
    while stack:
        one, two = stack.pop()
        if one in pairs:
            if pairs[one] is not two:
                return None
            continue
        if not _same_operation(one, two) or (one is first.own) != (two is other.own):
            return None
        pairs[one] = two
        stack += zip(one.operands, two.operands, strict=True)
    return pairs


def completed(first: Expression, other: Expression, columns: int) -> Expression:
    """Pad ``other`` with neutral elements for the per-column additions and multiplications that only ``first`` has.

    For example, some models have a bias for queries but none for keys. If the expressions differ in other ways,
    ``other`` is returned unchanged.
    """
    chain, left = _chain(first), _chain(other)
    width = other.shape[columns]
    if not chain or left is None or not isinstance(width, int) or len(left) >= len(chain):
        return other
    value, inputs, rows = other.own, list(other.inputs), dict(first.inputs)
    for operation, place in chain:
        operands = list(operation.operands)
        if left and left[0][1] == place and _same_operation(operation, left[0][0]):
            operands = list(left.pop(0)[0].operands)
        elif operation.dtype is not value.dtype or not value.dtype.is_float:
            return other
        elif operation.op in NEUTRAL:
            leaf = operands[1 - place]
            if leaf not in rows or not _is_row(first, rows[leaf], columns, spreads=False):
                return other
            operands[1 - place] = Scalar(leaf.dtype, leaf.op, value=leaf.value)
            behind = len(other.shape) - 1 - columns % len(other.shape)
            inputs.append((operands[1 - place], _full(rows[leaf], (width, *[1] * behind), NEUTRAL[operation.op])))
        elif operation.op != "cast":  # a cast to the type that the value already has needs no operation
            return other
        operands[place] = value
        value = Scalar(operation.dtype, operation.op, tuple(operands), operation.value)
    return other if left else Expression(value, other.own, tuple(inputs), other.shape)


def _chain(expression: Expression) -> list[tuple[Scalar, int]] | None:
    """Return the operations from ``own`` to the value, each with the index of the operand that leads to ``own``.

    Returns None if several paths lead to ``own``, or if the path has more than `LONGEST` operations.
    """
    chain: list[tuple[Scalar, int]] = []
    current = expression.value
    while current is not expression.own:
        places = [i for i, x in enumerate(current.operands) if expression.own in reachable([x])]
        if len(places) != 1 or len(chain) == LONGEST:
            return None
        chain.insert(0, (current, places[0]))
        current = current.operands[places[0]]
    return chain


def _full(x: Tensor, shape: tuple[int, ...], value: float) -> Tensor:
    """Return a constant of ``shape`` filled with ``value``, with the dtype of the constant x."""
    constant = derived_constant(Recipe("full", (x.constant_view(),), (value,)), x.dtype, shape)
    return Tensor(constant.dtype, constant.shape, Buffer(BufferKind.WEIGHT, constant.nbytes, data=constant))


def _same_operation(one: Scalar, two: Scalar) -> bool:
    return (one.op, one.dtype, one.value, len(one.operands)) == (two.op, two.dtype, two.value, len(two.operands))


def _same_elements(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors of equal shape have equal elements: they are the same view, or both broadcast one
    known element of equal value.
    """
    if x.dtype is not y.dtype:
        return False
    if x.buffer is y.buffer and x.offset == y.offset and x.strides == y.strides:
        return True
    one, two = _only_element(x), _only_element(y)
    return one is not None and one == two


def _only_element(x: Tensor) -> bytes | None:
    """Return the bytes of the element that x broadcasts; None if x has several elements or is not a constant."""
    if any(dim != 1 and stride != 0 for dim, stride in zip(x.shape, x.strides, strict=True)):
        return None
    contents = Tensor(x.dtype, (), x.buffer, offset=x.offset).constant
    return None if contents is None else contents.tobytes()


def _beside(shape: Sequence[Dim], columns: int | None) -> tuple[Dim, ...]:
    return tuple(dim for axis, dim in enumerate(shape) if columns is None or axis != columns % len(shape))


def _are_matching(
    first: Expression, x: Tensor, other: Expression, y: Tensor, columns: int | None, spreads: bool
) -> bool:
    if x.dtype is not y.dtype:
        return False
    if columns is None:
        return _same_elements(_spread(x, first.shape), _spread(y, other.shape))
    if _is_row(first, x, columns, spreads) and _is_row(other, y, columns, spreads):
        return True
    return _are_same(first, x, other, y, columns)


def _are_same(first: Expression, x: Tensor, other: Expression, y: Tensor, columns: int) -> bool:
    """Return whether x and y, broadcast to their expressions' shapes, have equal elements and do not vary along
    ``columns``.
    """
    one, two = _spread(x, first.shape), _spread(y, other.shape)
    if one.strides[columns] != 0 or two.strides[columns] != 0:
        return False
    return _same_elements(one, Tensor(two.dtype, one.shape, two.buffer, strides=two.strides, offset=two.offset))


def _spread(x: Tensor, shape: tuple[Dim, ...]) -> Tensor:
    return Tensor(x.dtype, shape, x.buffer, strides=broadcast_strides(x, shape), offset=x.offset)


def _is_row(expression: Expression, x: Tensor, columns: int, spreads: bool) -> bool:
    """Return whether x is a constant with one element per column.

    If ``spreads``, a single element for all columns also counts.
    """
    strides = broadcast_strides(x, expression.shape)
    beside = zip(_beside(expression.shape, columns), _beside(strides, columns), strict=True)
    has_columns = strides[columns] == 1 or (spreads and strides[columns] == 0)
    return x.is_constant and has_columns and all(dim == 1 or stride == 0 for dim, stride in beside)


def joined_inputs(
    first: Expression, others: Sequence[Expression], columns: int, shape: tuple[Dim, ...]
) -> tuple[Input, ...]:
    """Return the inputs of the joint expression over ``shape``, without the leaf ``own`` (accumulator or loaded
    element).

    The joint expression has the operations of ``first``. Constants that differ between ``first`` and ``others`` are
    concatenated along ``columns``.
    """
    matches = [(other, same_leaves(first, other, columns, spreads=True), dict(other.inputs)) for other in others]
    inputs: list[Input] = []
    for leaf, x in first.inputs:
        beside = []
        for other, pairs, theirs in matches:
            assert pairs is not None
            beside.append((other, theirs[pairs[leaf]]))
        if not all(_are_same(first, x, other, y, columns) for other, y in beside):
            rows = [_row(one, y, columns) for one, y in ((first, x), *beside)]
            row = joined_constant(rows, axis=0)
            behind = len(shape) - 1 - columns % len(shape)
            x = Tensor(x.dtype, (*row.shape, *[1] * behind), row.buffer, strides=(1, *[0] * behind))
        elif x.size != 1:
            x = Tensor(x.dtype, shape, x.buffer, strides=broadcast_strides(x, first.shape), offset=x.offset)
        inputs.append((leaf, x))
    return tuple(inputs)


def joined_conversion(
    conversions: Sequence[Conversion], operands: Sequence[Tensor], columns: int, joined: Tensor
) -> Conversion:
    """Return the prologue of ``joined``, the concatenated operand."""
    first, *others = (converted_by(*pair) for pair in zip(conversions, operands, strict=True))
    inputs = joined_inputs(first, others, columns, joined.shape)
    return replace(conversions[0], inputs=tuple((leaf, _spread(x, joined.shape)) for leaf, x in inputs))


def _row(expression: Expression, x: Tensor, columns: int) -> Tensor:
    stride = broadcast_strides(x, expression.shape)[columns]
    return Tensor(x.dtype, (expression.shape[columns],), x.buffer, strides=(stride,), offset=x.offset)


def joined_constant(tensors: Sequence[Tensor], axis: int) -> Tensor:
    """Return the concatenation of constants along ``axis``; the constant is computed when a plan first needs it."""
    shape = list(tensors[0].static_shape)
    shape[axis] = sum(x.static_shape[axis] for x in tensors)
    recipe = Recipe("join", tuple(x.constant_view() for x in tensors), (axis,))
    constant = derived_constant(recipe, tensors[0].dtype, tuple(shape))
    return Tensor(constant.dtype, constant.shape, Buffer(BufferKind.WEIGHT, constant.nbytes, data=constant))
