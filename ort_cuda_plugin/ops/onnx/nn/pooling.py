"""Pooling over sliding windows; MaxUnpool, which scatters its results back, and Col2Im, which adds up windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Unpack

from ....kernels.conv.pool import launch_pool
from ....kernels.elementwise.index_map import IndexMap, gather_map, scatter_map, unravel
from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import Dim, floordiv, product
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import full
from ....program.lowering.reduce import reduce
from ....program.steps.row_program import MAX, SUM, Row
from ....program.steps.windows import Windows
from ... import requirements as require
from ...outputs import is_used
from ...registry import ARITHMETIC, BOOL, FLOATS, T1, HostTensor, Int64, T, op
from .windows import Ints, PaddingAttributes, PoolAttributes, WindowAttributes, count_windows, per_axis, windows


def _windows(
    ctx: Lowering, x: Tensor, *, kernel_shape: Ints, ceil_mode: int = 0, **attributes: Unpack[WindowAttributes]
) -> tuple[Windows, tuple[Dim, ...]]:
    """Return the windows of a pooling operator, and their number along each dimension."""
    window = windows(x.shape[2:], kernel_shape, **attributes)
    return window, count_windows(ctx, window, bool(ceil_mode), may_exceed=True)


@op("MaxPool", since=1, types={"T": FLOATS | {DType.INT8, DType.UINT8}})
def max_pool(
    ctx: Lowering, x: T, *, storage_order: int = 0, **attributes: Unpack[PoolAttributes]
) -> tuple[Tensor, ...]:
    window, spatial = _windows(ctx, x, **attributes)
    return launch_pool(ctx, x, window, spatial, "max", indices=is_used(ctx, 1), column_major=bool(storage_order))


@op("AveragePool", since=1, types={"T": FLOATS})
def average_pool(
    ctx: Lowering, x: T, *, count_include_pad: int = 0, **attributes: Unpack[PoolAttributes]
) -> tuple[Tensor, ...]:
    window, spatial = _windows(ctx, x, **attributes)
    if window.kernel == window.size and not any((*window.begin, *window.end)) and x.rank > 2:
        return (global_average_pool(ctx, x),)
    return launch_pool(ctx, x, window, spatial, "average", include_pad=bool(count_include_pad))


def _global_pool(name: str, fn: Callable[[Row, Scalar], Scalar]) -> Callable[[Lowering, Tensor], Tensor]:
    @op(name, since=1, types={"T": FLOATS})
    def function(ctx: Lowering, x: T) -> Tensor:
        require.least_rank(3, X=x)
        return reduce(ctx, fn, x, range(2, x.rank))

    return function


global_average_pool = _global_pool("GlobalAveragePool", lambda row, value: s.cast(row.mean(value), value.dtype))
_global_pool("GlobalMaxPool", lambda row, value: row.reduce(MAX, value))


def _norm_pool(ctx: Lowering, x: Tensor, window: Windows, spatial: Sequence[Dim], p: float) -> Tensor:
    """Return the p-norm of each window, with zeros outside of x."""
    require.least(1, p=p)
    real = s.accumulation_type(x.dtype)

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        source = maps.source(x)
        kernel, steps, gaps, begin = (
            maps.dims(values) for values in (window.kernel, window.strides, window.dilations, window.begin)
        )

        def power(k: Scalar) -> list[Scalar]:
            coordinates: list[Scalar] = []
            inside = s.constant(True, DType.BOOL)
            for axis, within in enumerate(unravel(k, kernel)):
                at = c[2 + axis] * steps[axis] - begin[axis] + within * gaps[axis]
                inside = inside & (at >= 0) & (at < source.dim(2 + axis))
                coordinates.append(at)
            value = s.absolute(s.cast(source.at([*c[:2], *coordinates], inside), real))
            return [s.power(value, float(p))]

        (total,) = maps.fold(SUM, maps.dim(product(window.kernel)), power)
        return s.cast(s.power(total, 1.0 / p), x.dtype)

    return gather_map(ctx, [*x.shape[:2], *spatial], x.dtype, element)


@op("LpPool", since=2, types={"T": FLOATS})
def lp_pool(ctx: Lowering, x: T, *, p: int = 2, **attributes: Unpack[PoolAttributes]) -> Tensor:
    return _norm_pool(ctx, x, *_windows(ctx, x, **attributes), p)


@op("LpPool", since=1, types={"T": FLOATS})
def lp_pool_1(
    ctx: Lowering, x: T, *, kernel_shape: Ints, p: float = 2.0, **attributes: Unpack[PaddingAttributes]
) -> Tensor:
    return _norm_pool(ctx, x, *_windows(ctx, x, kernel_shape=kernel_shape, **attributes), p)


@op("GlobalLpPool", since=1, types={"T": FLOATS})
def global_lp_pool(ctx: Lowering, x: T, *, p: float = 2.0) -> Tensor:
    window = windows(x.shape[2:], x.shape[2:])
    return _norm_pool(ctx, x, window, [1] * (x.rank - 2), p)


@op("MaxUnpool", since=9, types={"T1": FLOATS})
def max_unpool(
    ctx: Lowering,
    x: T1,
    indices: Int64,
    output_shape: HostTensor | None = None,
    *,
    kernel_shape: tuple[int, ...],
    pads: tuple[int, ...] | None = None,
    strides: tuple[int, ...] | None = None,
) -> Tensor:
    """Scatter x to the flat ``indices`` of the inferred result; ``output_shape`` then pads or crops its end.

    Indices out of range are ignored.
    """
    rank = x.rank - 2
    require.least_rank(3, X=x)
    require.shape(ctx, x.shape, I=indices)
    steps, both = per_axis("strides", strides, 1, rank), per_axis("pads", pads, 0, 2 * rank, 0)
    kernel = per_axis("kernel_shape", kernel_shape, 1, rank)
    windowed = zip(x.shape[2:], steps, both[:rank], both[rank:], kernel, strict=True)
    inferred = [*x.shape[:2], *((n - 1) * step - begin - end + k for n, step, begin, end, k in windowed)]
    shape: Sequence[Dim] = inferred
    if output_shape is not None:
        shape = ctx.host_values(output_shape, "output_shape")
        require.count(x.rank, output_shape=shape)
    for dim in (*inferred, *shape):
        require.least_dim(ctx, 0, **{"each dimension of the result": dim})
    result = full(ctx, shape, 0, x.dtype)

    def move(maps: IndexMap, c: list[Scalar]) -> tuple[list[Scalar], Scalar, Scalar]:
        index = maps.source(indices).at(c)
        inside = (index >= 0) & (index < maps.dim(product(inferred)))
        target = unravel(index, maps.dims(inferred))
        for at, limit in zip(target, shape, strict=True):
            inside = inside & (at < maps.dim(limit))
        return target, maps.source(x).at(c), inside

    scatter_map(ctx, x.shape, result, move)
    return result


@op("Col2Im", since=18, types={"T": ARITHMETIC | BOOL})
def col2im(
    ctx: Lowering,
    x: T,
    image_shape: HostTensor,
    block_shape: HostTensor,
    *,
    dilations: tuple[int, ...] | None = None,
    pads: tuple[int, ...] | None = None,
    strides: tuple[int, ...] | None = None,
) -> Tensor:
    """Sum, for each image element, the elements of all blocks that cover it."""
    require.rank(3, input=x)
    image, block = ctx.host_values(image_shape, "image_shape"), ctx.host_values(block_shape, "block_shape")
    require.that(len(image) > 0, "image_shape", "not be empty", "none")
    require.count(len(image), block_shape=block)
    rank = len(image)
    steps, gaps = per_axis("strides", strides, 1, rank), per_axis("dilations", dilations, 1, rank)
    both = per_axis("pads", pads, 0, 2 * rank, 0)
    window = Windows(tuple(image), tuple(block), steps, gaps, both[:rank], both[rank:])
    for dim in (*image, *block):
        require.least_dim(ctx, 1, **{"each of image_shape and block_shape": dim})
    count, size = count_windows(ctx, window), product(block)
    channels = floordiv(x.shape[1], size)
    require.multiple_of(ctx, x.shape[1], size, "dimension 1 of input", "the number of elements of a block")
    require.dim(ctx, 2, product(count), input=x)
    reduction = MAX if x.dtype is DType.BOOL else SUM

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        source, taps, counts = maps.source(x), maps.dims(block), maps.dims(count)
        step, gap, begin = (maps.dims(values) for values in (steps, gaps, window.begin))
        total_taps = maps.dim(size)

        def covering(k: Scalar) -> list[Scalar]:
            column, inside = s.constant(0, DType.INT64), s.constant(True, DType.BOOL)
            for axis, tap in enumerate(unravel(k, taps)):
                start = c[2 + axis] + begin[axis] - tap * gap[axis]
                number = s.trunc_divide(start, step[axis])
                on_step = (start >= 0) & s.equal(number * step[axis], start)
                inside = inside & on_step & (number < counts[axis])
                column = column * counts[axis] + number
            return [s.widen(source.at([c[0], c[1] * total_taps + k, column], inside))]

        return s.cast(maps.fold(reduction, total_taps, covering)[0], x.dtype)

    return gather_map(ctx, [x.shape[0], channels, *image], x.dtype, element)
