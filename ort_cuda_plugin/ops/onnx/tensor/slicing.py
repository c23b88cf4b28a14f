"""Slice, Split, Concat, Tile, Pad, sliding windows and space-to-depth operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ....kernels.codegen.source import constant_number
from ....kernels.elementwise.index_map import IndexMap, gather_map
from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import (
    Dim,
    ceildiv,
    eq,
    floordiv,
    is_read_back,
    logical_or,
    lt,
    select,
    sym_max,
    sym_min,
    truncdiv,
)
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import copy_into, elementwise
from ....program.lowering.host import on_host
from ....program.lowering.memory_order import empty_in_order
from ....program.lowering.views import permute, reshape
from ... import requirements as require
from ...axes import axes_count, normalize_axes, normalize_axis
from ...registry import ALL_TENSORS, ARITHMETIC, BOOL, FLOATS, INDICES, HostTensor, T, contrib_op, op


def clamp(value: Dim, low: Dim, high: Dim) -> Dim:
    return sym_max(low, sym_min(value, high))


_INT_MAX = (2**31 - 1, 2**63 - 1)
"""Values of ``end`` (INT32_MAX, INT64_MAX) that mean the last element in the direction of the step, inclusive."""


def slice_axis(ctx: Lowering, x: Tensor, axis: int, start: Dim, end: Dim, step: Dim = 1) -> Tensor:
    """Return the view ``x[start:end:step]`` along one axis by Python's rules; `_INT_MAX` has further values of ``end``.

    A backward slice that starts before the first element holds the first element, as in ONNX.
    """
    require.holds(ctx, 1 - eq(step, 0), "each of steps", "not be 0", step)
    dim = x.shape[axis]
    if not isinstance(step, int) or abs(step) > _INT_MAX[0]:
        longest = sym_max(dim, 1)
        step = clamp(step, -longest, longest)  # a step of this length leaves the dimension at once

    def from_front(index: Dim) -> Dim:
        if not isinstance(index, int):
            index = ctx.settled_size(clamp(index, -1 * dim - 1, dim))  # avoids int64 overflow
        from_end = ctx.settled(lt(index, 0))
        return select(lt(index, 0), index + dim, index) if from_end is None else index + dim if from_end else index

    if ctx.guard(lt(step, 0)):
        first = sym_min(sym_max(from_front(start), 0), dim - 1)
        to_end = logical_or(*(eq(end, limit) for limit in _INT_MAX))
        last = select(to_end, -1, clamp(from_front(end), -1, dim - 1))
        count = sym_max(ceildiv(first - last, -step), 0)
    else:
        first, last = (ctx.settled_size(clamp(from_front(index), 0, dim)) for index in (start, end))
        count = sym_max(ceildiv(last - first, step), 0)
    shape, strides = list(x.shape), list(x.strides)
    offset = x.offset + first * strides[axis]
    shape[axis], strides[axis] = ctx.settled_size(count), strides[axis] * step
    return ctx.view(x, shape, strides, offset)


def _slice(
    ctx: Lowering,
    x: Tensor,
    starts: Sequence[Dim],
    ends: Sequence[Dim],
    axes: Sequence[Dim] | None,
    steps: Sequence[Dim] | None,
) -> Tensor:
    chosen = normalize_axes(range(len(starts)) if axes is None else axes, x.rank)
    steps = [1] * len(starts) if steps is None else steps
    require.count(len(starts), ends=ends, axes=chosen, steps=steps)
    for axis, start, end, step in zip(chosen, starts, ends, steps, strict=True):
        x = slice_axis(ctx, x, axis, start, end, step)
    return x


@op("Slice", since=1, types={"T": ALL_TENSORS})
def slice_1(
    ctx: Lowering, data: Tensor, *, starts: tuple[int, ...], ends: tuple[int, ...], axes: tuple[int, ...] | None = None
) -> Tensor:
    return _slice(ctx, data, starts, ends, axes, None)


@op("DynamicSlice", since=1, until=9, types={"T": ALL_TENSORS, "Tind": INDICES})  # removed from ONNX; no input steps
@op("Slice", since=10, types={"T": ALL_TENSORS})
def slice_10(
    ctx: Lowering,
    data: T,
    starts: HostTensor,
    ends: HostTensor,
    axes: HostTensor | None = None,
    steps: HostTensor | None = None,
) -> Tensor:
    first, last = ctx.host_values(starts, "starts"), ctx.host_values(ends, "ends")
    chosen = None if axes is None else ctx.host_constants(axes, "axes", range(axes_count(axes)))
    return _slice(ctx, data, first, last, chosen, None if steps is None else ctx.host_values(steps, "steps"))


def _split(ctx: Lowering, x: Tensor, axis: int, sizes: Sequence[Dim]) -> tuple[Tensor, ...]:
    parts = []
    offset = x.offset
    total: Dim = 0
    for size in sizes:
        shape = [*x.shape[:axis], size, *x.shape[axis + 1 :]]
        parts.append(ctx.view(x, shape, x.strides, offset))
        offset = offset + size * x.strides[axis]
        total = total + size
        require.least_dim(ctx, 0, split=size)
    require.holds(ctx, eq(total, x.shape[axis]), "split", f"add up to {x.shape[axis]!r}", total)
    return tuple(parts)


def _num_outputs(ctx: Lowering) -> int:
    assert ctx.node is not None
    return len(ctx.node.outputs)


def _equal_parts(ctx: Lowering, dim: Dim) -> list[Dim]:
    return [dim // _num_outputs(ctx)] * _num_outputs(ctx)


def _float_counts(ctx: Lowering, x: Tensor, what: str) -> tuple[Dim, ...]:
    """Return counts, which opset 1 stores as floats, as integers."""
    if x.is_constant and x.constant is not None:
        return tuple(int(value) for value in x.constant.reshape(-1))
    whole = elementwise(ctx, lambda a: s.cast(s.widen(a), DType.INT64), x)
    return tuple(ctx.read_back(whole, what, 0))


@op("Split", since=1, types={"T": FLOATS})
def split_1(
    ctx: Lowering, x: Tensor, sizes: Tensor | None = None, *, axis: int = 0, split: tuple[int, ...] | None = None
) -> tuple[Tensor, ...]:
    if sizes is None:
        return split_2(ctx, x, axis=axis, split=split)
    return _split(ctx, x, normalize_axis(axis, x.rank), _float_counts(ctx, sizes, "sizes of Split"))


@op("Split", since=2, types={"T": ALL_TENSORS})
def split_2(ctx: Lowering, x: Tensor, *, axis: int = 0, split: tuple[int, ...] | None = None) -> tuple[Tensor, ...]:
    axis = normalize_axis(axis, x.rank)
    return _split(ctx, x, axis, split or _equal_parts(ctx, x.shape[axis]))


@op("Split", since=13, types={"T": ALL_TENSORS})
def split_13(
    ctx: Lowering, x: T, split: HostTensor | None = None, *, axis: int = 0, num_outputs: int | None = None
) -> tuple[Tensor, ...]:
    """Split x. With ``num_outputs``, an attribute since version 18, the last part may be smaller."""
    axis = normalize_axis(axis, x.rank)
    dim = x.shape[axis]
    require.that(split is None or num_outputs is None, "split and num_outputs", "not be given together", "both")
    if split is not None:
        return _split(ctx, x, axis, ctx.host_values(split, "split"))
    require.one_of((_num_outputs(ctx),), num_outputs=num_outputs)
    if num_outputs is None:
        return _split(ctx, x, axis, _equal_parts(ctx, dim))
    part = ceildiv(dim, num_outputs)
    last = dim - part * (num_outputs - 1)
    require.least_dim(ctx, 0, **{"the size of the last of num_outputs parts": last})
    return _split(ctx, x, axis, [part] * (num_outputs - 1) + [last])


@op("Concat", since=1, types={"T": ALL_TENSORS})
def concat_1(ctx: Lowering, *inputs: Tensor, axis: int = 1) -> Tensor:
    return concat(ctx, *inputs, axis=axis)


@op("Concat", since=4, types={"T": ALL_TENSORS})
def concat(ctx: Lowering, *inputs: Tensor, axis: int) -> Tensor:
    """Copy each input into its slice of the result.

    As in ONNX Runtime, the other dimensions of an input that is empty along ``axis`` may differ.
    """
    at = normalize_axis(axis, inputs[0].rank)
    for x in inputs:
        require.rank(inputs[0].rank, **{"each input": x})
    inputs = tuple(_inputs_that_add(ctx, inputs, at)) or inputs[:1]
    first = inputs[0]
    if len(inputs) == 1:
        return first
    total: Dim = 0
    for x in inputs:
        for other in range(x.rank):
            if other != at:
                require.dim(ctx, other, first.shape[other], **{"each input": x})
        total = total + x.shape[at]
    shape = [*first.shape[:at], total, *first.shape[at + 1 :]]

    def on_device() -> Tensor:
        result = empty_in_order(ctx, shape, first.dtype, inputs)
        offset = result.offset
        for x in inputs:
            part = [*first.shape[:at], x.shape[at], *first.shape[at + 1 :]]
            if x.shape[at] != 0:
                copy_into(ctx, ctx.view(result, part, result.strides, offset), x)
            offset = offset + x.shape[at] * result.strides[at]
        return result

    return on_host(ctx, lambda *arrays: np.concatenate(arrays, axis=at), inputs, shape, first.dtype, on_device)


def _inputs_that_add(ctx: Lowering, inputs: Sequence[Tensor], at: int) -> list[Tensor]:
    """Return the inputs that are not empty along axis ``at``; all inputs if their other dimensions agree.

    An input counts as not empty if a Run reads its size back, since a guard cannot test this size.
    """
    others = {(*x.shape[:at], *x.shape[at + 1 :]) for x in inputs}
    if len(others) == 1:
        return list(inputs)
    empty = [eq(x.shape[at], 0) for x in inputs]
    return [x for x, nothing in zip(inputs, empty, strict=True) if is_read_back(nothing) or not ctx.guard(nothing)]


@op("Tile", since=1, types={"T": FLOATS})
def tile_1(ctx: Lowering, x: Tensor, tiles: Tensor, axis: Tensor) -> Tensor:
    """Repeat x ``tiles`` times along one axis."""
    number = constant_number(axis)
    at = normalize_axis(require.static(None if number is None else int(number), "axis"), x.rank)
    require.that(tiles.size == 1, "tiles", "have one element", f"{tiles.size} elements")
    (count,) = _float_counts(ctx, tiles, "tiles of Tile")
    return _tile(ctx, x, [count if other == at else 1 for other in range(x.rank)])


@op("Tile", since=6, types={"T": ALL_TENSORS})
def tile(ctx: Lowering, x: T, repeats: HostTensor) -> Tensor:
    return _tile(ctx, x, ctx.host_values(repeats, "repeats"))


def _tile(ctx: Lowering, x: Tensor, counts: Sequence[Dim]) -> Tensor:
    """Repeat x along each dimension: copy from a view with a dimension of stride 0 before each dimension."""
    require.count(x.rank, repeats=counts)
    shape: list[Dim] = []
    strides: list[Dim] = []
    for count, dim, stride in zip(counts, x.shape, x.strides, strict=True):
        require.least_dim(ctx, 0, repeats=count)
        shape += [count, dim]
        strides += [0, stride]
    repeated = ctx.view(x, shape, strides, x.offset)
    return reshape(ctx, repeated, [count * dim for count, dim in zip(counts, x.shape, strict=True)])


def _outside(mode: str) -> Callable[[Scalar, Scalar], Scalar]:
    """Return the function that maps an index outside [0, dim) to the index that Pad reads, by ``mode``."""

    def reflect(i: Scalar, dim: Scalar) -> Scalar:
        period = (dim - 1) * 2
        m = s.floor_modulo(i, period)
        return s.where(m < dim, m, period - m)

    modes: dict[str, Callable[[Scalar, Scalar], Scalar]] = {
        "edge": lambda i, dim: s.minimum(s.maximum(i, 0), dim - 1),
        "reflect": reflect,
        "wrap": s.floor_modulo,
    }
    require.supported(mode in modes, "attribute", "mode", repr(mode), ", ".join(["'constant'", *map(repr, modes)]))
    return modes[mode]


def _cut(ctx: Lowering, x: Tensor, begins: Sequence[Dim], ends: Sequence[Dim]) -> Tensor:
    """Return the view of x without the elements that negative pads remove."""
    removed = [(sym_max(0 - begin, 0), sym_max(0 - end, 0)) for begin, end in zip(begins, ends, strict=True)]
    shape = [dim - first - last for dim, (first, last) in zip(x.shape, removed, strict=True)]
    for dim in shape:
        require.least_dim(ctx, 0, **{"each dimension of data after negative pads": dim})
    offset = x.offset
    for stride, (first, _) in zip(x.strides, removed, strict=True):
        offset = offset + first * stride
    return ctx.view(x, shape, x.strides, offset)


def pad(ctx: Lowering, x: Tensor, begins: Sequence[Dim], ends: Sequence[Dim], mode: str, fill: Tensor | None) -> Tensor:
    """Add elements, or for negative counts remove them, at both ends of each dimension; ``fill`` None: 0."""
    shape = [dim + begin + end for dim, begin, end in zip(x.shape, begins, ends, strict=True)]
    for dim in shape:
        require.least_dim(ctx, 0, **{"each dimension of the result": dim})
    if all(count == 0 for count in (*begins, *ends)):
        return x
    outside = None if mode == "constant" else _outside(mode)
    if outside is not None:
        # Padding reads only elements that negative counts do not remove.
        x = _cut(ctx, x, begins, ends)
        begins, ends = ([sym_max(count, 0) for count in counts] for counts in (begins, ends))
        expected = f"have elements in each dimension that mode {mode!r} pads"
        for dim, padded in zip(x.shape, shape, strict=True):
            if dim != padded:
                require.holds(ctx, sym_max(dim, eq(padded, 0)), "data", expected, "none")

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        source = maps.source(x)
        coordinates = []
        inside = None
        for axis, (at, begin, end) in enumerate(zip(c, begins, ends, strict=True)):
            if begin == 0 and end == 0:
                coordinates.append(at)
                continue
            i, dim = at - maps.dim(begin), source.dim(axis)
            if outside is not None:
                coordinates.append(outside(i, dim))
                continue
            test = (i >= 0) & (i < dim)
            inside = test if inside is None else inside & test
            coordinates.append(i)
        if inside is None:
            return source.at(coordinates)
        return source.at(coordinates, inside, 0 if fill is None else maps.number(fill))

    return gather_map(ctx, shape, x.dtype, element)


@op("Pad", since=1, types={"T": ALL_TENSORS})
def pad_1(
    ctx: Lowering, data: Tensor, *, paddings: tuple[int, ...], mode: str = "constant", value: float = 0.0
) -> Tensor:
    return pad_2(ctx, data, pads=paddings, mode=mode, value=value)


@op("Pad", since=2, types={"T": ALL_TENSORS})
def pad_2(ctx: Lowering, data: Tensor, *, pads: tuple[int, ...], mode: str = "constant", value: float = 0.0) -> Tensor:
    require.count(2 * data.rank, pads=pads)
    fill = ctx.constant(np.array(value, data.dtype.numpy)) if value else None
    return pad(ctx, data, pads[: data.rank], pads[data.rank :], mode, fill)


@op("Pad", since=11, types={"T": ALL_TENSORS, "Tind": ALL_TENSORS})
def pad_11(
    ctx: Lowering,
    data: T,
    pads: HostTensor,
    constant_value: T | None = None,
    axes: HostTensor | None = None,
    *,
    mode: str = "constant",
) -> Tensor:
    counts = ctx.host_values(pads, "pads")
    chosen = range(data.rank) if axes is None else ctx.host_constants(axes, "axes", range(axes_count(axes)))
    positions = normalize_axes(chosen, data.rank)
    require.count(2 * len(positions), pads=counts)
    begins: list[Dim] = [0] * data.rank
    ends: list[Dim] = [0] * data.rank
    for axis, begin, end in zip(positions, counts, counts[len(positions) :], strict=False):
        begins[axis], ends[axis] = begin, end
    return pad(ctx, data, begins, ends, mode, constant_value)


@op("CenterCropPad", since=18, types={"T": ALL_TENSORS, "Tind": INDICES})
def center_crop_pad(ctx: Lowering, x: T, shape: HostTensor, *, axes: tuple[int, ...] | None = None) -> Tensor:
    sizes = ctx.host_values(shape, "shape")
    positions = normalize_axes(range(x.rank) if axes is None else axes, x.rank)
    require.count(len(positions), shape=sizes)
    begins: list[Dim] = [0] * x.rank
    ends: list[Dim] = [0] * x.rank
    for axis, size in zip(positions, sizes, strict=True):
        added = size - x.shape[axis]
        begins[axis] = truncdiv(added, 2)
        ends[axis] = added - begins[axis]
    return pad(ctx, x, begins, ends, "constant", None)


@op("DepthToSpace", since=1, types={"T": ALL_TENSORS})
def depth_to_space(ctx: Lowering, x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    n, c, h, w = _image(x)
    depth = c // (blocksize * blocksize)
    require.multiple_of(ctx, c, blocksize * blocksize, "the number of channels of input", "blocksize * blocksize")
    require.that(mode in ("DCR", "CRD"), "mode", "be 'DCR' or 'CRD'", repr(mode))
    if mode == "DCR":
        moved = permute(ctx, reshape(ctx, x, [n, blocksize, blocksize, depth, h, w]), (0, 3, 4, 1, 5, 2))
    else:
        moved = permute(ctx, reshape(ctx, x, [n, depth, blocksize, blocksize, h, w]), (0, 1, 4, 2, 5, 3))
    return reshape(ctx, moved, [n, depth, h * blocksize, w * blocksize])


@op("SpaceToDepth", since=1, types={"T": ALL_TENSORS})
def space_to_depth(ctx: Lowering, x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    n, c, h, w = _image(x)
    height, width = h // blocksize, w // blocksize
    require.multiple_of(ctx, h, blocksize, "the height of input", "blocksize")
    require.multiple_of(ctx, w, blocksize, "the width of input", "blocksize")
    parted = reshape(ctx, x, [n, c, height, blocksize, width, blocksize])
    orders = {"DCR": (0, 3, 5, 1, 2, 4), "CRD": (0, 1, 3, 5, 2, 4)}
    require.one_of(orders, mode=mode)
    moved = permute(ctx, parted, orders[mode])
    return reshape(ctx, moved, [n, c * blocksize * blocksize, height, width])


def _image(x: Tensor) -> tuple[Dim, Dim, Dim, Dim]:
    require.rank(4, input=x)
    return x.shape[0], x.shape[1], x.shape[2], x.shape[3]


@contrib_op("UnfoldTensor", T=ARITHMETIC | BOOL)
def unfold_tensor(ctx: Lowering, x: Tensor, *, dim: int = -1, size: int, step: int = 1) -> Tensor:
    """Return a view of all windows of ``size`` along ``dim`` with stride ``step``; a new last axis holds a window."""
    require.least(1, size=size, step=step)
    axis = normalize_axis(dim, x.rank)
    require.most_dim(ctx, x.shape[axis], size=size)
    shape, strides = [*x.shape, size], [*x.strides, x.strides[axis]]
    shape[axis] = floordiv(x.shape[axis] - size, step) + 1
    strides[axis] = x.strides[axis] * step
    return ctx.view(x, shape, strides, x.offset)
