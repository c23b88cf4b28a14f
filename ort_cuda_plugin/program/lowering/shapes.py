"""Shape functions: axes, broadcasting, and merging of dimensions."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from ..expressions.symbolic import Dim, eq, logical_or, select
from ..steps.tensor import Tensor
from .conditions import Conditions

Strides = tuple[Dim, ...]


def axes_of(axes: Iterable[int], rank: int) -> tuple[int, ...]:
    """Return the axes as nonnegative ints; negative axes count from the end. Raises TypeError for an invalid axis."""
    found = [operator.index(axis) for axis in axes]
    if outside := [axis for axis in found if not -rank <= axis < rank]:
        raise TypeError(f"axis: got {outside[0]}, expected one in [{-rank}, {rank})")
    return tuple(axis % rank for axis in found)


def broadcast_shapes(ctx: Conditions, *shapes: Sequence[Dim]) -> tuple[Dim, ...]:
    """Return the shape that all ``shapes`` broadcast to, by the rules of ONNX and NumPy.

    The plan is guarded on which symbolic sizes are 1, since fusion depends on them. For a size that a Run reads back,
    and in a claim, the result is ``select(eq(a, 1), b, a)`` instead.
    """
    rank = max((len(shape) for shape in shapes), default=0)
    result: list[Dim] = [1] * rank
    for shape in shapes:
        for axis, dim in enumerate(shape, rank - len(shape)):
            result[axis] = _broadcast_dims(ctx, result[axis], dim)
    return tuple(result)


def _broadcast_dims(ctx: Conditions, a: Dim, b: Dim) -> Dim:
    if a == b or b == 1:
        return a
    if a == 1:
        return b
    a_is_1, b_is_1 = eq(a, 1), eq(b, 1)
    ctx.require(
        logical_or(eq(a, b), logical_or(a_is_1, b_is_1)),
        f"dimensions cannot be broadcast to each other: got {a!r} and {b!r}, expected equal sizes, or a size of 1",
    )
    if a_is_1 == 0 and b_is_1 == 0:
        return a if isinstance(a, int) else b
    if a_is_1 == 0:
        return a
    if b_is_1 == 0:
        return b
    first = ctx.settled(a_is_1)
    if first is None:
        return select(a_is_1, b, a)
    return b if first else a


def aligned(ctx: Conditions, x: Tensor, shape: Sequence[Dim]) -> Tensor:
    """Return x, which broadcasts to ``shape``, with each size as 1 or as the equal expression in ``shape``.

    The plan is guarded on which of the two a symbolic size equals. A size for which `Conditions.settled` returns None
    stays as it is.
    """
    dims: list[Dim] = []
    for dim, target in zip(x.shape, shape[len(shape) - x.rank :], strict=True):
        if dim not in (1, target):
            is_1 = ctx.settled(eq(dim, 1))
            dim = dim if is_1 is None else 1 if is_1 else target
        dims.append(dim)
    return x if tuple(dims) == x.shape else Tensor(x.dtype, dims, x.buffer, strides=x.strides, offset=x.offset)


def broadcast_strides(x: Tensor, shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """Return the strides that read x as a tensor of ``shape``, to which x broadcasts: 0 for broadcast dimensions."""
    if x.shape == tuple(shape):
        return x.strides
    lead = len(shape) - x.rank
    strides: list[Dim] = [0] * lead
    for dim, stride, target in zip(x.shape, x.strides, shape[lead:], strict=True):
        strides.append(stride if dim == target else select(eq(dim, 1), 0, stride))
    return tuple(strides)


def collapse(shape: Sequence[Dim], strides: Sequence[Strides]) -> tuple[list[Dim], list[Strides]]:
    """Return the fewest dimensions, and the strides over them, that address the same elements of tensors of ``shape``.

    Dimensions of size 1 are removed; adjacent dimensions merge if that provably works with the strides of every tensor.
    """
    dims: list[Dim] = []
    kept: list[list[Dim]] = [[] for _ in strides]
    for axis, dim in enumerate(shape):
        if dim == 1:
            continue
        if dims and all(k[-1] == s[axis] * dim for k, s in zip(kept, strides, strict=True)):
            dims[-1] = dims[-1] * dim
            for k, s in zip(kept, strides, strict=True):
                k[-1] = s[axis]
        else:
            dims.append(dim)
            for k, s in zip(kept, strides, strict=True):
                k.append(s[axis])
    return dims, [tuple(k) for k in kept]
