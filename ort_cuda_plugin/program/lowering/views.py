"""Views of tensors without a copy: transpositions, slices, broadcasts, reshapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

from ..expressions.symbolic import Dim, eq, hint, product
from ..steps.steps import Map
from ..steps.tensor import Tensor, dims_of
from .host import on_host
from .recorder import Recorder
from .shapes import axes_of, broadcast_shapes, broadcast_strides

AnyMap = TypeVar("AnyMap", bound=Map)


def permute(ctx: Recorder, x: Tensor, axes: Sequence[int]) -> Tensor:
    """Return x with its dimensions in the order ``axes``, without a copy."""
    axes = axes_of(axes, x.rank)
    return ctx.view(x, [x.shape[axis] for axis in axes], [x.strides[axis] for axis in axes], x.offset)


def transpose_matrices(ctx: Recorder, x: Tensor) -> Tensor:
    """Return x [..., m, n] as [..., n, m], without a copy."""
    return permute(ctx, x, (*range(x.rank - 2), x.rank - 1, x.rank - 2))


def part(ctx: Recorder, x: Tensor, axis: int, start: Dim, size: Dim) -> Tensor:
    """Return the slice of ``size`` indices from ``start`` on along ``axis``, without a copy; it must be inside x."""
    shape = [size if other == axis else dim for other, dim in enumerate(x.shape)]
    return ctx.view(x, shape, x.strides, x.offset + start * x.strides[axis])


def expand(ctx: Recorder, x: Tensor, shape: Sequence[Dim]) -> Tensor:
    """Return x broadcast to the common shape of x and ``shape`` (ONNX's Expand), without a copy."""
    target = broadcast_shapes(ctx, x.shape, shape)
    return ctx.view(x, target, broadcast_strides(x, target), x.offset)


def squeeze(ctx: Recorder, x: Tensor, axes: Sequence[int]) -> Tensor:
    """Return x without the dimensions ``axes``, which must have size 1; without a copy."""
    gone = axes_of(axes, x.rank)
    if ctx.checks_author:
        for axis in gone:
            ctx.require(eq(x.shape[axis], 1), f"squeeze of {x!r}: dimension {axis} must have size 1")
    kept = [axis for axis in range(x.rank) if axis not in gone]
    return permute(ctx, x, kept)


def unsqueeze(ctx: Recorder, x: Tensor, axes: Sequence[int]) -> Tensor:
    """Return x with dimensions of size 1 inserted at ``axes`` of the result, without a copy."""
    shape, strides = list(x.shape), list(x.strides)
    for axis in sorted(axes_of(axes, x.rank + len(axes))):
        shape.insert(axis, 1)
        strides.insert(axis, 0)
    return ctx.view(x, shape, strides, x.offset)


def reshape(ctx: Recorder, x: Tensor, shape: Sequence[Dim]) -> Tensor:
    """Return x reshaped to ``shape`` in row-major order. Copies x only if no strides express the reshaped view."""
    shape = dims_of(shape, x.dtype)
    if ctx.checks_author:
        ctx.require(
            eq(product(shape), x.size),
            f"reshape of {x!r} to {shape}: the shape must have as many elements as the tensor",
        )
    strides = None if x.is_contiguous else _reshaped_strides(x, shape)
    if strides is None:
        x = _contiguous(ctx, x)
    return ctx.view(x, shape, strides, x.offset)


def _contiguous(ctx: Recorder, x: Tensor) -> Tensor:
    """Return a copy of x in row-major order. The host copies shape arithmetic, so that no Run must read it back.

    PyTorch's exporter computes the pads of a Pad so: it reverses, transposes and flattens a matrix of two columns.
    """
    if x.is_constant:
        return ctx.contiguous(x)
    return on_host(ctx, lambda contents: contents, (x,), x.shape, x.dtype, lambda: ctx.contiguous(x))


def _reshaped_strides(x: Tensor, shape: Sequence[Dim]) -> list[Dim] | None:
    """Return the strides of x viewed as ``shape``; None if no strides express this view.

    Adjacent dimensions of x that together form the same size as adjacent dimensions of ``shape`` must be dense in x.
    """
    source = [(dim, stride) for dim, stride in zip(x.shape, x.strides, strict=True) if dim != 1]
    target = [dim for dim in shape if dim != 1]
    strides: list[Dim] = []
    while source or target:
        if not source or not target:
            return None
        run, wanted = [source.pop(0)], [target.pop(0)]
        size, wanted_size = run[0][0], wanted[0]
        while size != wanted_size:
            # Extend the side whose expected size is smaller. Only provably equal sizes end the loop.
            if hint(size) < hint(wanted_size) and source:
                run.append(source.pop(0))
                size = size * run[-1][0]
            elif hint(size) > hint(wanted_size) and target:
                wanted.append(target.pop(0))
                wanted_size = wanted_size * wanted[-1]
            else:
                return None
        if any(outer[1] != inner[1] * inner[0] for outer, inner in pairwise(run)):
            return None
        stride = run[-1][1]
        piece: list[Dim] = []
        for dim in reversed(wanted):
            piece.append(stride)
            stride = stride * dim
        strides += reversed(piece)
    remaining = iter(strides)
    return [0 if dim == 1 else next(remaining) for dim in shape]


def permuted(step: AnyMap, axes: Sequence[int]) -> AnyMap:
    """Return the step with the dimensions of its result, outputs and epilogue inputs permuted."""
    rank = len(step.shape)

    def moved(x: Tensor) -> Tensor:
        if x.size == 1:
            return x
        dims = (*[1] * (rank - x.rank), *x.shape)
        strides = broadcast_strides(x, step.shape)
        shape = [dims[axis] for axis in axes]
        return Tensor(x.dtype, shape, x.buffer, strides=[strides[axis] for axis in axes], offset=x.offset)

    return replace(
        step,
        shape=tuple(step.shape[axis] for axis in axes),
        inputs=tuple((leaf, moved(x)) for leaf, x in step.inputs),
        outputs=tuple((value, moved(y)) for value, y in step.outputs),
    )
