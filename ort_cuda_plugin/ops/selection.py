"""Operators that choose elements by their values: sorting, compaction, suppression, and sequences of given lengths."""

from __future__ import annotations

from ort_cuda_plugin.graph.ir import DType, InvalidModel
from ort_cuda_plugin.graph.lowering import Lowering, Tensor
from ort_cuda_plugin.graph.symbolic import Dim, le, logical_and, product, sym_min
from ort_cuda_plugin.kernels import scalar as s
from ort_cuda_plugin.kernels.elementwise import elementwise
from ort_cuda_plugin.kernels.index import IndexMap, gather_map, scatter_map
from ort_cuda_plugin.kernels.scalar import Scalar
from ort_cuda_plugin.kernels.select import count_prefixes, sort_rows
from ort_cuda_plugin.kernels.views import permute, reshape
from ort_cuda_plugin.ops.axes import normalize_axis
from ort_cuda_plugin.ops.registry import (
    ALL_TENSORS,
    ARITHMETIC,
    BOOL,
    FLOATS,
    T1,
    HostTensor,
    T,
    op,
)


def _top_k(ctx: Lowering, x: Tensor, k: Dim, axis: int, largest: bool) -> tuple[Tensor, Tensor]:
    at = normalize_axis(axis, x.rank)
    n = x.shape[at]
    ctx.require(logical_and(le(0, k), le(k, n)), "k of TopK is not between 0 and the size of the axis")
    others = [*x.shape[:at], *x.shape[at + 1 :]]
    by_row = permute(ctx, x, [*(a for a in range(x.rank) if a != at), at])
    order, _ = sort_rows(ctx, reshape(ctx, by_row, (product(others), n, 1)), descending=largest)
    order = reshape(ctx, order, (*others, n))
    shape = [*x.shape[:at], k, *x.shape[at + 1 :]]

    def index(maps: IndexMap, c: list[Scalar]) -> Scalar:
        return maps.source(order).at([*c[:at], *c[at + 1 :], c[at]])

    def value(maps: IndexMap, c: list[Scalar]) -> Scalar:
        return maps.source(x).at([*c[:at], index(maps, c), *c[at + 1 :]])

    return gather_map(ctx, shape, x.dtype, value), gather_map(ctx, shape, DType.INT64, index)


@op("TopK", since=1, until=9, types={"T": FLOATS})
def top_k_1(ctx: Lowering, x: T, *, k: int, axis: int = -1) -> tuple[Tensor, ...]:
    return _top_k(ctx, x, k, axis, True)


@op("TopK", since=10, types={"T": ARITHMETIC})
def top_k(
    ctx: Lowering, x: T, k: HostTensor, *, axis: int = -1, largest: int = 1, sorted: int = 1
) -> tuple[Tensor, ...]:
    # The order of unsorted results is free; the sorted one serves. NaN is larger than every number.
    return _top_k(ctx, x, ctx.host_values(k, "k of TopK")[0], axis, bool(largest))


def _found(ctx: Lowering, flags: Tensor, what: str) -> tuple[Tensor, Dim]:
    """The place of each flag that is set among those that are, int64 of the shape of ``flags``, and their number."""
    before, total = count_prefixes(ctx, flags)
    (count,) = ctx.read_back(total, what, 0, flags.size)
    return reshape(ctx, before, flags.shape), count


@op("NonZero", since=9, types={"T": ALL_TENSORS})
def non_zero(ctx: Lowering, x: T) -> Tensor:
    flags = elementwise(ctx, lambda v: v if x.dtype is DType.BOOL else s.not_equal(v, 0), x)
    places, count = _found(ctx, flags, "number of nonzero elements")
    result = ctx.empty((x.rank, count), DType.INT64)

    def coordinate(maps: IndexMap, c: list[Scalar]) -> tuple[list[Scalar], Scalar, Scalar]:
        value = s.constant(0, DType.INT64)
        for axis, own in enumerate(c[1:]):
            value = s.where(s.equal(c[0], axis), own, value)
        return [c[0], maps.source(places).at(c[1:])], value, maps.source(flags).at(c[1:])

    if x.rank:
        scatter_map(ctx, (x.rank, *x.shape), result, coordinate)
    return result


@op("Compress", since=9, types={"T": ALL_TENSORS, "T1": BOOL})
def compress(ctx: Lowering, x: T, condition: T1, *, axis: int | None = None) -> Tensor:
    if condition.rank != 1:
        raise InvalidModel(f"condition of Compress of rank {condition.rank}")
    if axis is None:
        x = reshape(ctx, x, (x.size,))
    at = 0 if axis is None else normalize_axis(axis, x.rank)
    # A condition that is shorter than the axis drops the rest.
    n = sym_min(condition.size, x.shape[at])
    flags = ctx.view(condition, (n,), condition.strides, condition.offset)
    places, count = _found(ctx, flags, "number of elements that Compress keeps")
    result = ctx.empty((*x.shape[:at], count, *x.shape[at + 1 :]), x.dtype)

    def move(maps: IndexMap, c: list[Scalar]) -> tuple[list[Scalar], Scalar, Scalar]:
        target = [*c[:at], maps.source(places).at([c[at]]), *c[at + 1 :]]
        return target, maps.source(x).at(c), maps.source(flags).at([c[at]])

    scatter_map(ctx, (*x.shape[:at], n, *x.shape[at + 1 :]), result, move)
    return result
