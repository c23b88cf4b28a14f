"""TopK, NonZero, Compress, Unique, NonMaxSuppression, ReverseSequence, Where and Trilu."""

from __future__ import annotations

import numpy as np

from ....kernels.block_algorithms.non_max_suppression import suppress_boxes
from ....kernels.elementwise.index_map import IndexMap, gather_map, scatter_map
from ....kernels.scan_sort.select import count_prefixes, sort_rows
from ....kernels.scan_sort.top_k import top_rows
from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import Dim, le, logical_and, product, sym_min
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import elementwise
from ....program.lowering.views import permute, reshape
from ... import requirements as require
from ...axes import normalize_axis
from ...registry import ALL_TENSORS, ARITHMETIC, BOOL, T1, B, HostTensor, Int64, T, contrib_op, op
from .indexing import chosen_slices, order_of


def _top_k(ctx: Lowering, x: Tensor, k: Dim, axis: int, largest: bool) -> tuple[Tensor, Tensor]:
    at = normalize_axis(axis, x.rank)
    n = x.shape[at]
    require.holds(ctx, logical_and(le(0, k), le(k, n)), "k", f"be in [0, {n!r}]", k)
    others = [*x.shape[:at], *x.shape[at + 1 :]]
    by_row = permute(ctx, x, [*(a for a in range(x.rank) if a != at), at])
    flat = reshape(ctx, by_row, (product(others), n))
    if (found := top_rows(ctx, flat, k, largest=largest)) is not None:
        back = [*range(at), len(others), *range(at, len(others))]
        values, indices = (permute(ctx, reshape(ctx, y, (*others, k)), back) for y in found)
        return values, indices
    order = reshape(ctx, order_of(ctx, flat, descending=largest), (*others, n))
    shape = [*x.shape[:at], k, *x.shape[at + 1 :]]

    def index(maps: IndexMap, c: list[Scalar]) -> Scalar:
        return maps.source(order).at([*c[:at], *c[at + 1 :], c[at]])

    def value(maps: IndexMap, c: list[Scalar]) -> Scalar:
        return maps.source(x).at([*c[:at], index(maps, c), *c[at + 1 :]])

    return gather_map(ctx, shape, x.dtype, value), gather_map(ctx, shape, DType.INT64, index)


@op("TopK", since=1, until=9, types={"T": ARITHMETIC})
def top_k_1(ctx: Lowering, x: T, *, k: int, axis: int = -1) -> tuple[Tensor, ...]:
    return _top_k(ctx, x, k, axis, True)


@op("TopK", since=10, types={"T": ARITHMETIC})
def top_k(
    ctx: Lowering, x: T, k: HostTensor, *, axis: int = -1, largest: int = 1, sorted: int = 1
) -> tuple[Tensor, ...]:
    # Unsorted results may have any order, so they are sorted too. NaN ranks above all other values.
    return _top_k(ctx, x, ctx.host_number(k, "k"), axis, bool(largest))


def _found(ctx: Lowering, flags: Tensor, what: str) -> tuple[Tensor, Dim]:
    """Return the index of each set flag among the set flags (exclusive prefix count), int64, and their number."""
    before, total = count_prefixes(ctx, flags)
    (count,) = ctx.read_back(total, what, 0, flags.size)
    return reshape(ctx, before, flags.shape), count


@op("NonZero", since=9, types={"T": ALL_TENSORS})
def non_zero(ctx: Lowering, x: T) -> Tensor:
    flags = ctx.contiguous(elementwise(ctx, lambda v: v if x.dtype is DType.BOOL else s.not_equal(v, 0), x))
    before, count = _found(ctx, flags, "number of nonzero elements")
    result = ctx.empty((x.rank, count), DType.INT64)

    def coordinate(maps: IndexMap, c: list[Scalar]) -> tuple[list[Scalar], Scalar, Scalar]:
        value = s.constant(0, DType.INT64)
        for axis, own in enumerate(c[1:]):
            value = s.where(s.equal(c[0], axis), own, value)
        return [c[0], maps.source(before).at(c[1:])], value, maps.source(flags).at(c[1:])

    if x.rank:
        scatter_map(ctx, (x.rank, *x.shape), result, coordinate)
    return result


@op("Compress", since=9, types={"T": ALL_TENSORS, "T1": BOOL})
def compress(ctx: Lowering, x: T, condition: T1, *, axis: int | None = None) -> Tensor:
    require.rank(1, condition=condition)
    if axis is None:
        x = reshape(ctx, x, (x.size,))
    at = 0 if axis is None else normalize_axis(axis, x.rank)
    # A condition shorter than the axis drops the rest of the axis.
    n = sym_min(condition.size, x.shape[at])
    flags = ctx.view(condition, (n,), condition.strides, condition.offset)
    before, count = _found(ctx, flags, "number of elements that Compress keeps")
    result = ctx.empty((*x.shape[:at], count, *x.shape[at + 1 :]), x.dtype)

    def move(maps: IndexMap, c: list[Scalar]) -> tuple[list[Scalar], Scalar, Scalar]:
        target = [*c[:at], maps.source(before).at([c[at]]), *c[at + 1 :]]
        return target, maps.source(x).at(c), maps.source(flags).at([c[at]])

    scatter_map(ctx, (*x.shape[:at], n, *x.shape[at + 1 :]), result, move)
    return result


@op("Unique", since=11, types={"T": ALL_TENSORS})
def unique(ctx: Lowering, x: T, *, axis: int | None = None, sorted: int = 1) -> tuple[Tensor, ...]:
    if axis is None:
        x = reshape(ctx, x, (x.size,))
    at = 0 if axis is None else normalize_axis(axis, x.rank)
    n = x.shape[at]
    others = [*x.shape[:at], *x.shape[at + 1 :]]
    slices = permute(ctx, x, [at, *(a for a in range(x.rank) if a != at)])
    order, heads = (reshape(ctx, t, (n,)) for t in sort_rows(ctx, reshape(ctx, slices, (1, n, product(others)))))
    groups, count = _found(ctx, heads, "number of unique elements")
    # The sort is stable: the first member of a group of equal elements is the first in x.
    starts, first = (ctx.empty((count,), DType.INT64) for _ in range(2))
    for target, of in ((starts, None), (first, order)):

        def head(maps: IndexMap, c: list[Scalar], of: Tensor | None = of) -> tuple[list[Scalar], Scalar, Scalar]:
            value = c[0] if of is None else maps.source(of).at(c)
            return [maps.source(groups).at(c)], value, maps.source(heads).at(c)

        scatter_map(ctx, (n,), target, head)

    def length(maps: IndexMap, c: list[Scalar]) -> Scalar:
        start, after = maps.source(starts), c[0] + 1
        return start.at([after], after < maps.dim(count), maps.dim(n)) - start.at(c)

    counts = gather_map(ctx, (count,), DType.INT64, length)
    number = None if sorted else _order_of_appearance(ctx, first, n)
    inverse = ctx.empty((n,), DType.INT64)

    def member(maps: IndexMap, c: list[Scalar]) -> tuple[list[Scalar], Scalar, None]:
        is_head = s.cast(maps.source(heads).at(c), DType.INT64)
        group = maps.source(groups).at(c) + is_head - 1
        return [maps.source(order).at(c)], group if number is None else maps.source(number).at([group]), None

    scatter_map(ctx, (n,), inverse, member)
    if number is not None:
        first, counts = (_scattered(ctx, t, number) for t in (first, counts))
    return chosen_slices(ctx, x, at, first), first, inverse, counts


def _order_of_appearance(ctx: Lowering, first: Tensor, n: Dim) -> Tensor:
    """Return, for each of the distinct indices ``first``, below ``n``, how many of them are smaller (int64)."""

    marks, flag = ctx.empty((n,), DType.BOOL), s.constant(True, DType.BOOL)
    ctx.memset(marks, 0)
    scatter_map(ctx, first.shape, marks, lambda maps, c: ([maps.source(first).at(c)], flag, None))
    before, _ = count_prefixes(ctx, marks)
    return gather_map(ctx, first.shape, DType.INT64, lambda maps, c: maps.source(before).at([maps.source(first).at(c)]))


def _scattered(ctx: Lowering, x: Tensor, targets: Tensor) -> Tensor:
    """Permute a vector: element i moves to index ``targets[i]``."""
    result = ctx.empty(x.shape, x.dtype)
    scatter_map(ctx, x.shape, result, lambda maps, c: ([maps.source(targets).at(c)], maps.source(x).at(c), None))
    return result


@op("NonMaxSuppression", since=10)
def non_max_suppression(
    ctx: Lowering,
    boxes: Tensor,
    scores: Tensor,
    max_output_boxes_per_class: Int64 | None = None,
    iou_threshold: Tensor | None = None,
    score_threshold: Tensor | None = None,
    *,
    center_point_box: int = 0,
) -> Tensor:
    require.rank(3, scores=scores)
    limit, overlap = max_output_boxes_per_class, iou_threshold
    require.scalar(ctx, max_output_boxes_per_class=limit, iou_threshold=overlap, score_threshold=score_threshold)
    batches, classes, n = scores.shape
    require.shape(ctx, (batches, n, 4), boxes=boxes)
    limit = ctx.constant(np.zeros(1, np.int64)) if limit is None else limit
    overlap = ctx.constant(np.zeros(1, np.float32)) if overlap is None else overlap
    order = order_of(ctx, scores)
    flat = reshape(ctx, order, (batches * classes, n))
    kept = suppress_boxes(ctx, boxes, scores, flat, limit, overlap, score_threshold, center=bool(center_point_box))
    flags = reshape(ctx, kept, scores.shape)
    before, count = _found(ctx, flags, "number of boxes that NonMaxSuppression keeps")
    result = ctx.empty((count, 3), DType.INT64)

    def box(maps: IndexMap, c: list[Scalar]) -> tuple[list[Scalar], Scalar, Scalar]:
        at, column = c[:3], c[3]
        value = s.where(s.equal(column, 1), c[1], maps.source(order).at(at))
        value = s.where(s.equal(column, 0), c[0], value)
        return [maps.source(before).at(at), column], value, maps.source(flags).at(at)

    scatter_map(ctx, (*scores.shape, 3), result, box)
    return result


@op("ReverseSequence", since=10, types={"T": ALL_TENSORS})
def reverse_sequence(ctx: Lowering, x: T, sequence_lens: Int64, *, batch_axis: int = 1, time_axis: int = 0) -> Tensor:
    batch, time = normalize_axis(batch_axis, x.rank), normalize_axis(time_axis, x.rank)
    require.least_rank(2, input=x)
    require.that(batch != time, "batch_axis and time_axis", "be different", f"{batch} twice")
    require.shape(ctx, (x.shape[batch],), sequence_lens=sequence_lens)

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        # A length beyond the dimension must not read outside the buffer.
        end = s.minimum(maps.source(sequence_lens).at([c[batch]]), maps.dim(x.shape[time]))
        at = s.where(c[time] < end, end - 1 - c[time], c[time])
        return maps.source(x).at([*c[:time], at, *c[time + 1 :]])

    return gather_map(ctx, x.shape, x.dtype, element)


@op("Where", since=9, types={"B": BOOL, "T": ALL_TENSORS})
def where(ctx: Lowering, condition: B, x: T, y: T) -> Tensor:
    return elementwise(ctx, s.where, condition, x, y)


@contrib_op("Trilu", T=ALL_TENSORS)
@op("Trilu", since=14, types={"T": ALL_TENSORS})
def trilu(ctx: Lowering, x: T, k: HostTensor | None = None, *, upper: int = 1) -> Tensor:
    require.least_rank(2, input=x)
    diagonal: Dim = 0 if k is None else ctx.host_number(k, "k")

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        distance = c[-1] - c[-2]
        kept = distance >= maps.dim(diagonal) if upper else distance <= maps.dim(diagonal)
        return maps.source(x).at(c, kept)

    return gather_map(ctx, x.shape, x.dtype, element)
