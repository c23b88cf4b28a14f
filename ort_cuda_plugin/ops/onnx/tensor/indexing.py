"""Gather operators and OneHot."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ....kernels.codegen.source import constant_number
from ....kernels.elementwise.index_map import IndexMap, Source, gather_map
from ....kernels.scan_sort.select import sort_rows
from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import Dim, eq, le, logical_and, lt, product, select
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import elementwise
from ....program.lowering.host import HostArray, integers, on_host
from ....program.lowering.views import reshape
from ... import requirements as require
from ...axes import normalize_axis
from ...registry import ALL_TENSORS, ARITHMETIC, INDICES, T1, T3, HostTensor, Int64, T, Tind, op


def wrapped(index: Scalar, dim: Scalar) -> tuple[Scalar, Scalar]:
    """Return the index counted from the front, and whether it is valid: no index may lead out of a buffer."""
    position = s.cast(index, DType.INT64)
    position = s.where(position < 0, position + dim, position)
    return position, (position >= 0) & (position < dim)


def select_index(ctx: Lowering, x: Tensor, axis: int, index: Dim) -> Tensor:
    """Return the view ``x[..., index, ...]`` without dimension ``axis``."""
    dim = x.shape[axis]
    position = select(lt(index, 0), index + dim, index)
    require.holds(
        ctx, logical_and(le(0, position), lt(position, dim)), "an index", f"be in [-n, n) with n = {dim!r}", index
    )
    offset = x.offset + position * x.strides[axis]
    kept = [other for other in range(x.rank) if other != axis]
    return ctx.view(x, [x.shape[other] for other in kept], [x.strides[other] for other in kept], offset)


def order_of(ctx: Lowering, x: Tensor, *, descending: bool = True) -> Tensor:
    """Argsort the last dimension of x, as int64; the sort is stable."""
    *outer, count = x.shape
    order, _ = sort_rows(ctx, reshape(ctx, x, [product(outer), count, 1]), descending=descending)
    return reshape(ctx, order, x.shape)


def elements_of_rows(ctx: Lowering, x: Tensor, columns: Tensor, shape: Sequence[Dim]) -> Tensor:
    """Return, with the 2-D ``shape``, element ``columns[row, i]`` of each row of x; all indices are valid."""
    return gather_map(ctx, shape, x.dtype, lambda maps, c: maps.source(x).at([c[0], maps.source(columns).at(c)]))


def chosen_slices(ctx: Lowering, x: Tensor, axis: int, slices: Tensor) -> Tensor:
    """Gather ``slices`` of x along ``axis``; all indices are valid."""

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        return maps.source(x).at([*c[:axis], maps.source(slices).at([c[axis]]), *c[axis + 1 :]])

    return gather_map(ctx, (*x.shape[:axis], slices.shape[0], *x.shape[axis + 1 :]), x.dtype, element)


@op("Gather", since=1, types={"T": ALL_TENSORS, "Tind": INDICES})
def gather(ctx: Lowering, data: T, indices: Tind, *, axis: int = 0) -> Tensor:
    """Gather slices; an index out of range yields 0."""
    axis = normalize_axis(axis, data.rank)
    if indices.rank == 0 and indices.host is not None:
        return select_index(ctx, data, axis, indices.host[0])
    shape = [*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :]]

    def on_device() -> Tensor:
        # Merge dimensions to three: before the axis, the axis, after it.
        before, after = product(data.shape[:axis]), product(data.shape[axis + 1 :])
        table = reshape(ctx, data, [before, data.shape[axis], after])
        flat = reshape(ctx, indices, [indices.size])

        def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
            source = maps.source(table)
            index, inside = wrapped(maps.source(flat).at([c[1]]), source.dim(1))
            return source.at([c[0], index, c[2]], inside)

        result = gather_map(ctx, [before, indices.size, after], data.dtype, element)
        return ctx.view(result, shape, None, result.offset)

    def on_symbols(values: HostArray, given: HostArray) -> HostArray:
        index, size = integers(given), values.shape[axis]
        index = np.where(index < 0, index + size, index)
        outside = np.zeros([1 if i == axis else dim for i, dim in enumerate(values.shape)], object)
        padded = np.concatenate([values, outside], axis)
        return np.take(padded, np.where((index >= 0) & (index < size), index, size), axis=axis)

    return on_host(ctx, on_symbols, (data, indices), shape, data.dtype, on_device)


def check_within(ctx: Lowering, data: Tensor, indices: Tensor, axis: int) -> None:
    """Check that ``indices`` are not larger than ``data`` in any dimension except ``axis``."""
    require.rank(data.rank, indices=indices)
    for other in range(data.rank):
        if other != axis:
            require.most_dim(ctx, data.shape[other], **{f"dimension {other} of indices": indices.shape[other]})


@op("GatherElements", since=11, types={"T": ALL_TENSORS, "Tind": INDICES})
def gather_elements(ctx: Lowering, data: T, indices: Tind, *, axis: int = 0) -> Tensor:
    axis = normalize_axis(axis, data.rank)
    check_within(ctx, data, indices, axis)

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        source = maps.source(data)
        index, inside = wrapped(maps.source(indices).at(c), source.dim(axis))
        return source.at([*c[:axis], index, *c[axis + 1 :]], inside)

    return gather_map(ctx, indices.shape, data.dtype, element)


def tuple_length(ctx: Lowering, indices: Tensor, most: int) -> int:
    """Return the last dimension of ``indices``, the length of index tuples; a plan holds for one length."""
    dim = indices.shape[-1] if indices.rank else 0
    length = ctx.chosen(dim, "the length of index tuples", range(1, max(most, 1) + 1))
    require.that(0 < length <= most, "the last dimension of indices", f"be in [1, {most}]", length)
    return length


def index_tuple(
    indices: Source, target: Source, at: Sequence[Scalar], first: int, length: int
) -> tuple[list[Scalar], Scalar]:
    """Return the tuple ``indices[at, :]`` into dimensions ``first``... of ``target``, and whether all are valid."""
    coordinates = []
    everywhere = s.constant(True, DType.BOOL)
    for k in range(length):
        index, inside = wrapped(indices.at([*at, s.constant(k, DType.INT64)]), target.dim(first + k))
        coordinates.append(index)
        everywhere = everywhere & inside
    return coordinates, everywhere


@op("GatherND", since=11, types={"T": ALL_TENSORS})
def gather_nd(ctx: Lowering, data: T, indices: Int64, *, batch_dims: int = 0) -> Tensor:
    require.within(0, min(indices.rank, data.rank) - 1, batch_dims=batch_dims)
    length = tuple_length(ctx, indices, data.rank - batch_dims)
    lead = indices.rank - 1
    for own, other in zip(indices.shape[:batch_dims], data.shape, strict=False):
        require.holds(ctx, eq(own, other), "each batch dimension of indices", f"be equal to data's, {other!r}", own)

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        source = maps.source(data)
        index, inside = index_tuple(maps.source(indices), source, c[:lead], batch_dims, length)
        return source.at([*c[:batch_dims], *index, *c[lead:]], inside)

    shape = [*indices.shape[:-1], *data.shape[batch_dims + length :]]
    return gather_map(ctx, shape, data.dtype, element)


@op("OneHot", since=9, types={"T1": ARITHMETIC, "T2": ARITHMETIC, "T3": ALL_TENSORS})
def one_hot(ctx: Lowering, indices: T1, depth: HostTensor, values: T3, *, axis: int = -1) -> Tensor:
    require.rank(1, values=values)
    at = normalize_axis(axis, indices.rank + 1)
    number = constant_number(depth)
    if depth.dtype.is_float and number is not None:
        require.that(math.isfinite(number), "depth", "be finite", number)
        classes: Dim = int(number)
    else:
        whole = elementwise(ctx, lambda x: s.cast(x, DType.INT64), depth) if depth.dtype.is_float else depth
        classes = ctx.host_number(whole, "depth")
    require.size(ctx, 2, values=values)
    require.least_dim(ctx, 0, depth=classes)

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        index = s.cast(maps.source(indices).at([*c[:at], *c[at + 1 :]]), DType.INT64)
        index = s.where(index < 0, index + maps.dim(classes), index)
        choice = maps.source(values)
        off, on = (choice.at([s.constant(k, DType.INT64)]) for k in (0, 1))
        return s.where(s.equal(index, c[at]), on, off)

    return gather_map(ctx, [*indices.shape[:at], classes, *indices.shape[at:]], values.dtype, element)
