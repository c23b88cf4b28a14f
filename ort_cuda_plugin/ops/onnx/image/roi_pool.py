"""Pooling of rectangular regions of images: RoiAlign and MaxRoiPool."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ....kernels.elementwise.index_map import IndexMap, Source, gather_map
from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.lowering.context import Lowering, Tensor
from ....program.steps.row_program import MAX, SUM, Reduction, lowest
from ... import requirements as require
from ...registry import FLOATS, INT64, T1, T2, T, attributes_of, op
from .resize import clamped, clamped_integer, round_half_away

FAR = 1 << 30
"""Bound of integer coordinates: beyond any image, without overflow in int64 arithmetic."""


def _check(ctx: Lowering, x: Tensor, rois: Tensor, columns: int) -> None:
    require.rank(4, X=x)
    require.rank(2, rois=rois)
    require.dim(ctx, 1, columns, rois=rois)


def _column(rois: Source, row: Scalar, column: int, real: DType) -> Scalar:
    return s.cast(rois.at([row, s.constant(column, DType.INT64)]), real)


@dataclass(frozen=True)
class _Samples:
    """Samples of one bin along one axis; ``all`` is their number.

    Only the ``count`` samples from index ``first`` on may be in the image. ``position(i)`` is the coordinate of
    sample ``first + i``.
    """

    all: Scalar
    first: Scalar
    count: Scalar
    position: Callable[[Scalar], Scalar]


def _samples(start: Scalar, extent: Scalar, bins: Scalar, at: Scalar, ratio: Scalar | None, size: Scalar) -> _Samples:
    """Return the samples of bin ``at``; those outside the image are skipped, so huge regions do not cost more."""
    real = start.dtype
    width = extent / s.cast(bins, real)
    samples = ratio if ratio is not None else clamped_integer(s.ceil(width), 0, FAR)
    number = s.cast(samples, real)
    begin = start + s.cast(at, real) * width
    step = width / s.maximum(number, 1.0)
    # Rounding may shift the bounds, so take one more sample on each side; the caller tests each sample.
    before = s.where(step > 0.0, (-1.0 - begin) / step - 2.0, 0.0)
    after = s.where(step > 0.0, (s.cast(size, real) - begin) / step + 2.0, number)
    first = clamped_integer(s.floor(before), 0, samples)
    last = clamped_integer(s.ceil(after), first, samples)
    return _Samples(samples, first, last - first, lambda i: begin + (s.cast(first + i, real) + 0.5) * width / number)


MAX_SAMPLING_RATIO = 1024
"""Maximum of sampling_ratio: one thread takes sampling_ratio ** 2 samples, one after the other."""


def _around(position: Scalar, size: Scalar) -> list[tuple[Scalar, Scalar]]:
    """Return the two neighbors of a real index with their weights, clamped to the axis."""
    position = s.maximum(position, 0.0)
    low = clamped(clamped_integer(s.floor(position), 0, size), size)
    high = s.minimum(low + 1, size - 1)
    fraction = s.where(low >= size - 1, 0.0, position - s.cast(low, position.dtype))
    return [(low, 1.0 - fraction), (high, fraction)]


def _roi_align(
    ctx: Lowering, x: Tensor, rois: Tensor, batch_indices: Tensor, half_pixel: bool, *, mode: str = "avg",
    output_height: int = 1, output_width: int = 1, sampling_ratio: int = 0, spatial_scale: float = 1.0,
) -> Tensor:  # fmt: skip
    _check(ctx, x, rois, 4)
    require.rank(1, batch_indices=batch_indices)
    require.least(1, output_height=output_height, output_width=output_width)
    require.least(0, sampling_ratio=sampling_ratio)
    if sampling_ratio > MAX_SAMPLING_RATIO:
        raise require.unsupported("attribute", "sampling_ratio", sampling_ratio, f"up to {MAX_SAMPLING_RATIO}")
    require.one_of(("avg", "max"), mode=mode)
    require.dim(ctx, 0, rois.shape[0], batch_indices=batch_indices)
    real = s.accumulation_type(x.dtype)

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        source, regions = maps.source(x), maps.source(rois)
        image = s.cast(maps.source(batch_indices).at([c[0]]), DType.INT64)
        exists = (image >= 0) & (image < source.dim(0)) & (source.dim(2) > 0) & (source.dim(3) > 0)
        shift = 0.5 if half_pixel else 0.0
        left, top, right, bottom = (_column(regions, c[0], i, real) * spatial_scale - shift for i in range(4))
        extents = [bottom - top, right - left]
        if not half_pixel:
            extents = [s.maximum(extent, 1.0) for extent in extents]
        ratio = maps.dim(sampling_ratio) if sampling_ratio else None
        rows = _samples(top, extents[0], maps.dim(output_height), c[2], ratio, source.dim(2))
        columns = _samples(left, extents[1], maps.dim(output_width), c[3], ratio, source.dim(3))

        def sample(k: Scalar) -> list[Scalar]:
            across = s.maximum(columns.count, 1)
            y, x_ = rows.position(s.trunc_divide(k, across)), columns.position(s.trunc_modulo(k, across))
            inside = exists
            for position, axis in ((y, 2), (x_, 3)):
                inside = inside & (position >= -1.0) & (position <= s.cast(source.dim(axis), real))
            values = [
                s.cast(source.at([image, c[1], row, column], inside), real) * row_weight * column_weight
                for row, row_weight in _around(y, source.dim(2))
                for column, column_weight in _around(x_, source.dim(3))
            ]
            total = functools.reduce(operator.add if mode == "avg" else s.maximum, values)
            return [s.where(inside, total, 0.0)]

        near, every = rows.count * columns.count, rows.all * columns.all
        if mode == "avg":
            (total,) = maps.fold(SUM, near, sample)
            return s.cast(total / s.cast(s.maximum(every, 1), real), x.dtype)
        # Skipped samples are outside the image and have the value 0, so 0 takes part in the maximum.
        return s.cast(_largest(maps, (near < every) | s.equal(every, 0), near, sample), x.dtype)

    return gather_map(ctx, [rois.shape[0], x.shape[1], output_height, output_width], x.dtype, element)


def _largest(maps: IndexMap, with_zero: Scalar, count: Scalar, value: Callable[[Scalar], list[Scalar]]) -> Scalar:
    """Return the maximum of ``count`` values, and of 0 if ``with_zero``."""
    real = value(count)[0].dtype
    start = s.where(with_zero, s.constant(0, real), float(lowest(real)))
    return maps.fold(Reduction(lambda dtypes: (start,), MAX.step, MAX.combine), count, value)[0]


@op("RoiAlign", since=10, types={"T1": FLOATS, "T2": INT64})
@attributes_of(_roi_align)
def roi_align_10(ctx: Lowering, x: T1, rois: T1, batch_indices: T2, **attributes: Any) -> Tensor:
    return _roi_align(ctx, x, rois, batch_indices, False, **attributes)


@op("RoiAlign", since=16, types={"T1": FLOATS, "T2": INT64})
@attributes_of(_roi_align)
def roi_align_16(
    ctx: Lowering,
    x: T1,
    rois: T1,
    batch_indices: T2,
    *,
    coordinate_transformation_mode: str = "half_pixel",
    **attributes: Any,
) -> Tensor:
    require.one_of(("half_pixel", "output_half_pixel"), coordinate_transformation_mode=coordinate_transformation_mode)
    half_pixel = coordinate_transformation_mode == "half_pixel"
    return _roi_align(ctx, x, rois, batch_indices, half_pixel, **attributes)


@op("MaxRoiPool", since=1, types={"T": FLOATS})
def max_roi_pool(ctx: Lowering, x: T, rois: T, *, pooled_shape: tuple[int, ...], spatial_scale: float = 1.0) -> Tensor:
    """Return the maximum of each bin; an empty bin yields 0."""
    _check(ctx, x, rois, 5)
    require.count(2, pooled_shape=pooled_shape)
    require.least(1, pooled_shape=min(pooled_shape))
    real = s.accumulation_type(x.dtype)

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        source, regions = maps.source(x), maps.source(rois)
        image = clamped_integer(_column(regions, c[0], 0, real), -1, FAR)
        firsts, counts = [], []
        for axis in (2, 3):
            edges = (_column(regions, c[0], column, real) * spatial_scale for column in (4 - axis, 6 - axis))
            first, last = (clamped_integer(round_half_away(edge), -FAR, FAR) for edge in edges)
            bins = maps.dim(pooled_shape[axis - 2])
            width = s.cast(s.maximum(last - first + 1, 1), real) / s.cast(bins, real)
            begin = s.cast(s.floor(s.cast(c[axis], real) * width), DType.INT64)
            end = s.cast(s.ceil(s.cast(c[axis] + 1, real) * width), DType.INT64)
            size = source.dim(axis)
            begin, end = (s.minimum(s.maximum(edge + first, 0), size) for edge in (begin, end))
            firsts.append(begin)
            counts.append(s.maximum(end - begin, 0))
        exists = (image >= 0) & (image < source.dim(0))
        count = s.where(exists, counts[0] * counts[1], 0)

        def value(k: Scalar) -> list[Scalar]:
            across = s.maximum(counts[1], 1)
            at = [firsts[0] + s.trunc_divide(k, across), firsts[1] + s.trunc_modulo(k, across)]
            return [s.cast(source.at([image, c[1], *at]), real)]

        return s.cast(_largest(maps, s.equal(count, 0), count, value), x.dtype)

    return gather_map(ctx, [rois.shape[0], x.shape[1], *pooled_shape], x.dtype, element)
