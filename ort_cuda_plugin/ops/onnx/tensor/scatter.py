"""Scatter operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from ....kernels.codegen.source import Combination
from ....kernels.elementwise.index_map import IndexMap, gather_map, scatter_map
from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import Dim, product
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import elementwise, elementwise_into
from ....program.steps.row_program import Reduction
from ... import requirements as require
from ...axes import normalize_axis
from ...registry import ALL_TENSORS, INDICES, Int64, T, Tind, op
from .indexing import check_within, index_tuple, wrapped

Target: TypeAlias = Callable[[IndexMap, list[Scalar]], tuple[list[Scalar], Scalar]]
"""Maps the coordinates of an update to coordinates in the result, and whether these are valid."""
Update: TypeAlias = Callable[[IndexMap, list[Scalar], Scalar], tuple[Scalar, Scalar]]
"""Maps the coordinates of an element and the number of an update to the update, and whether it is the element's."""

REDUCTIONS = {
    "none": None,
    "add": Combination(lambda a, b: a + b, "add"),
    "mul": Combination(lambda a, b: a * b),
    "min": Combination(s.minimum, "min"),
    "max": Combination(s.maximum, "max"),
}


def _accumulator(dtype: DType) -> DType:
    """Return the type in which updates are combined: at least 32 bits, for atomic instructions."""
    if dtype.is_float:
        return dtype if dtype.itemsize >= 4 else DType.FLOAT32
    return dtype if dtype.itemsize >= 4 else DType.INT32


def _scatter(ctx: Lowering, data: Tensor, updates: Tensor, target: Target, reduction: str) -> Tensor:
    """Return a copy of ``data`` with ``updates`` written, or combined with its elements."""
    require.one_of(REDUCTIONS, reduction=reduction)
    how = REDUCTIONS[reduction]
    if data.dtype is DType.BOOL and how is not None:
        # For booleans, add is "any" (max) and mul is "all" (min).
        how = REDUCTIONS[{"add": "max", "mul": "min"}.get(reduction, reduction)]
    dtype = data.dtype if how is None else _accumulator(data.dtype)
    result = ctx.empty(data.shape, dtype)
    elementwise_into(ctx, lambda x: s.cast(x, dtype), result, data)

    def move(maps: IndexMap, c: list[Scalar]) -> tuple[Sequence[Scalar], Scalar, Scalar]:
        coordinates, inside = target(maps, c)
        return coordinates, s.cast(maps.source(updates).at(c), dtype), inside

    scatter_map(ctx, updates.shape, result, move, how)
    return result if dtype is data.dtype else elementwise(ctx, lambda x: s.cast(x, data.dtype), result)


def _updated(
    ctx: Lowering, data: Tensor, updates: Tensor, target: Target, reduction: str, count: Dim, update: Update
) -> Tensor:
    """Return `_scatter`, or if a deterministic session reduces floats, each element combined with its updates in order.

    The latter gives the same bits in every Run. ``update(maps, c, j)`` returns update j of ``count``, and whether it
    belongs to element c. The work is the number of elements times ``count``.
    """
    how = REDUCTIONS.get(reduction)
    if how is None or not (ctx.options.deterministic and data.dtype.is_float):
        return _scatter(ctx, data, updates, target, reduction)
    dtype = _accumulator(data.dtype)

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        start = s.cast(maps.source(data).at(c), dtype)

        def numbered(j: Scalar) -> tuple[Scalar, Scalar]:
            value, is_own = update(maps, c, j)
            return s.cast(value, dtype), is_own

        reduction = Reduction(
            initial=lambda dtypes: (start,),
            step=lambda totals, update: (s.where(update[1], how.step(totals[0], update[0]), totals[0]),),
            combine=lambda a, b: (how.step(a[0], b[0]),),
        )
        return s.cast(maps.fold(reduction, maps.dim(count), numbered)[0], data.dtype)

    return gather_map(ctx, data.shape, data.dtype, element)


@op("Scatter", since=9, types={"T": ALL_TENSORS, "Tind": INDICES})
@op("ScatterElements", since=11, types={"T": ALL_TENSORS, "Tind": INDICES})
def scatter_elements(
    ctx: Lowering, data: T, indices: Tind, updates: T, *, axis: int = 0, reduction: str = "none"
) -> Tensor:
    """Scatter elements. Indices out of range are ignored. Without a reduction, any one update of an element wins."""
    axis = normalize_axis(axis, data.rank)
    check_within(ctx, data, indices, axis)
    require.shape(ctx, indices.shape, updates=updates)
    dim = data.shape[axis]

    def target(maps: IndexMap, c: list[Scalar]) -> tuple[list[Scalar], Scalar]:
        index, inside = wrapped(maps.source(indices).at(c), maps.dim(dim))
        return [*c[:axis], index, *c[axis + 1 :]], inside

    def update(maps: IndexMap, c: list[Scalar], j: Scalar) -> tuple[Scalar, Scalar]:
        at = [*c[:axis], j, *c[axis + 1 :]]
        inside = s.constant(True, DType.BOOL)
        for other in range(data.rank):
            if other != axis:
                inside = inside & (c[other] < maps.dim(indices.shape[other]))
        index, _ = wrapped(maps.source(indices).at(at, inside, -1), maps.dim(dim))
        is_own = inside & s.equal(index, c[axis])
        return maps.source(updates).at(at, is_own), is_own

    return _updated(ctx, data, updates, target, reduction, indices.shape[axis], update)


def _length_by_ranks(ctx: Lowering, data: Tensor, indices: Tensor, updates: Tensor) -> int:
    """Return the length of index tuples, derived from ranks since the dimension may be unknown."""
    length = data.rank + indices.rank - 1 - updates.rank
    if not 0 < length <= data.rank or indices.rank == 0:
        wanted = (
            f"have ranks i and u with i at least 1; the length of index tuples, {data.rank} + i - 1 - u, must be from "
            f"1 to {data.rank}"
        )
        raise require.violation("indices and updates", wanted, f"i = {indices.rank} and u = {updates.rank}")
    require.dim(ctx, -1, length, indices=indices)
    return length


@op("ScatterND", since=11, types={"T": ALL_TENSORS})
def scatter_nd(ctx: Lowering, data: T, indices: Int64, updates: T, *, reduction: str = "none") -> Tensor:
    """Scatter slices. Index tuples out of range are ignored. Without a reduction, any one update of an element wins."""
    length = _length_by_ranks(ctx, data, indices, updates)
    lead = indices.rank - 1
    require.shape(ctx, (*indices.shape[:-1], *data.shape[length:]), updates=updates)

    def target(maps: IndexMap, c: list[Scalar]) -> tuple[list[Scalar], Scalar]:
        index, inside = index_tuple(maps.source(indices), maps.source(data), c[:lead], 0, length)
        return [*index, *c[lead:]], inside

    def update(maps: IndexMap, c: list[Scalar], j: Scalar) -> tuple[Scalar, Scalar]:
        at: list[Scalar] = []
        for dim in reversed(indices.shape[:-1]):
            at.insert(0, s.trunc_modulo(j, maps.dim(dim)))
            j = s.trunc_divide(j, maps.dim(dim))
        index, is_own = index_tuple(maps.source(indices), maps.source(data), at, 0, length)
        for found, own in zip(index, c, strict=False):
            is_own = is_own & s.equal(found, own)
        return maps.source(updates).at([*at, *c[length:]], is_own), is_own

    return _updated(ctx, data, updates, target, reduction, product(indices.shape[:-1]), update)
