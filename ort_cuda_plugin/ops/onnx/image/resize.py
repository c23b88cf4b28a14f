"""Resize and Upsample: separable interpolation, a weighted sum of neighboring elements along each axis."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from ....kernels.elementwise.index_map import IndexMap, gather_map
from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Operand, Scalar
from ....program.expressions.symbolic import Dim, eq, floordiv, hint, le, lt, select, sym_max
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import elementwise
from ....program.steps.row_program import Reduction, highest, lowest
from ... import requirements as require
from ...axes import normalize_axes
from ...registry import ALL_TENSORS, NO_BFLOAT16, T1, T2, Float32, HostTensor, T, op

SHORT_SCALE = 1 << 10
"""Maximum numerator of a scale p / q for which floor(float32(dim) * scale) equals the integer formula dim * p // q."""

SUMS = Reduction(
    lambda dtypes: tuple(s.constant(0, dtype) for dtype in dtypes),
    lambda totals, elements: tuple(total + element for total, element in zip(totals, elements, strict=True)),
    lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True)),
)
"""Component-wise addition of several accumulators."""

ONE_8_BIT = 1 << 22
"""Fixed-point 1 of the weights with which ONNX Runtime and Pillow resample 8-bit images with antialias."""


@dataclass(frozen=True)
class Resampling:
    """Resampling of one axis. ``scale(maps)`` and ``roi(maps)`` return float32 Scalars; ``unscaled``: scale is 1."""

    axis: int
    size: Dim
    scale: Callable[[IndexMap], Scalar]
    unscaled: bool = False
    roi: Callable[[IndexMap], tuple[Scalar, Scalar]] | None = None


def _number_at(ctx: Lowering, x: Tensor, at: int) -> Callable[[IndexMap], Scalar]:
    element = ctx.view(x, (1,), (1,), x.offset + at * x.strides[0])
    return lambda maps: s.cast(maps.number(element), DType.FLOAT32)


def _original(mode: str, maps: IndexMap, at: Scalar, old: Scalar, new: Scalar, how: Resampling, real: DType) -> Scalar:
    """Return the source coordinate of element ``at``, by the coordinate transformation mode."""
    x, length, resized = (s.cast(value, real) for value in (at, old, new))
    scale = s.cast(how.scale(maps), real)
    if mode == "half_pixel":
        return (x + 0.5) / scale - 0.5
    if mode == "pytorch_half_pixel":
        return s.where(new > 1, (x + 0.5) / scale - 0.5, 0.0)
    if mode == "asymmetric":
        return x / scale
    if mode == "tf_half_pixel_for_nn":
        return (x + 0.5) / scale
    if mode == "align_corners":
        return s.where(new > 1, x * (length - 1.0) / s.maximum(resized - 1.0, 1.0), 0.0)
    if mode == "half_pixel_symmetric":
        # Input and output centers coincide although the output size is rounded. float64 as in ONNX Runtime: the nearest
        # element often depends on the last bit.
        offset = length * 0.5 * (1.0 - resized / (scale * length))
        exact = (s.cast(x, DType.FLOAT64) + 0.5) / s.cast(scale, DType.FLOAT64)
        return s.cast(s.cast(offset, DType.FLOAT64) + exact - 0.5, real)
    if mode == "tf_crop_and_resize":
        if how.roi is None:
            raise require.violation("roi", "be given if coordinate_transformation_mode is tf_crop_and_resize", "none")
        start, end = (s.cast(value, real) for value in how.roi(maps))
        between = start * (length - 1.0) + x * (end - start) * (length - 1.0) / s.maximum(resized - 1.0, 1.0)
        return s.where(new > 1, between, (start + end) * 0.5 * (length - 1.0))
    raise require.violation(
        "coordinate_transformation_mode", "be a mode that ONNX defines, such as half_pixel", repr(mode)
    )


def _nearest(mode: str, x: Scalar, scale: Scalar) -> Scalar:
    """Round ``x`` by ``nearest_mode``; "simple" is the rule of versions without the attribute."""
    modes = {
        "round_prefer_floor": s.ceil(x - 0.5),
        "round_prefer_ceil": s.floor(x + 0.5),
        "floor": s.floor(x),
        "ceil": s.ceil(x),
        "simple": s.where(s.cast(scale, x.dtype) < 1.0, s.ceil(x), s.floor(x)),
    }
    require.one_of(modes, nearest_mode=mode)
    return s.cast(modes[mode], DType.INT64)


def clamped(index: Scalar, size: Scalar) -> Scalar:
    return s.minimum(s.maximum(index, 0), size - 1)


def clamped_integer(x: Scalar, low: Operand, high: Operand) -> Scalar:
    """Convert a float to int64, truncated and clamped to [low, high]; ``low`` for NaN."""
    least, most = (s.cast(y if isinstance(y, Scalar) else s.constant(y, DType.INT64), x.dtype) for y in (low, high))
    return s.cast(s.where(x > least, s.where(x < most, x, most), least), DType.INT64)


def triangle(distance: Scalar) -> Scalar:
    """Return the weight of an element at a ``distance`` >= 0 in linear interpolation."""
    return s.maximum(1.0 - distance, 0.0)


def cubic(a: float) -> Callable[[Scalar], Scalar]:
    """Return the weight function of distances >= 0 for cubic convolution with parameter ``a``."""

    def weight(t: Scalar) -> Scalar:
        near = ((a + 2) * t - (a + 3)) * t * t + 1.0
        far = (((t - 5.0) * t + 8.0) * t - 4.0) * a
        return s.where(t <= 1.0, near, s.where(t < 2.0, far, 0.0))

    return weight


@dataclass(frozen=True)
class Interpolation:
    """Parameters that all axes of a Resize share; ``weight`` is 0 at distances from ``support`` on."""

    weight: Callable[[Scalar], Scalar]
    support: int
    transformation: str
    antialias: bool = False
    exclude_outside: bool = False
    extrapolation: float = 0.0


def _interpolate(ctx: Lowering, x: Tensor, how: Resampling, by: Interpolation, dtype: DType) -> Tensor:
    """Resample x along one axis, to ``dtype``."""
    real = s.accumulation_type(x.dtype)
    shape = [*x.shape[: how.axis], how.size, *x.shape[how.axis + 1 :]]

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        source = maps.source(x)
        size = source.dim(how.axis)
        position = _original(by.transformation, maps, c[how.axis], size, maps.dim(how.size), how, real)
        # Use ONNX Runtime's order of operations, because the rounding of ties depends on the last bit of the weights.
        shrink = 1.0 / s.maximum(1.0 / s.cast(how.scale(maps), real), 1.0) if by.antialias else s.constant(1, real)
        first = s.cast(s.floor(position), DType.INT64)
        reach = s.cast(s.ceil(by.support / shrink), DType.INT64)

        def weight_of(index: Scalar) -> Scalar:
            distance = s.cast(index, real) - (position + 0.5) + 0.5 if by.antialias else s.cast(index, real) - position
            weight = by.weight(s.absolute(distance) * shrink)
            return s.where((index >= 0) & (index < size), weight, 0.0) if by.exclude_outside else weight

        def element_at(index: Scalar) -> Scalar:
            return source.at([*c[: how.axis], clamped(index, size), *c[how.axis + 1 :]])

        def tap(offset: Scalar) -> tuple[Scalar, Scalar]:
            index = first + offset
            weight = weight_of(index)
            return s.cast(element_at(index), real) * weight, weight

        def rounded() -> Scalar:
            """Return the rounded sum with normalized weights. Samples outside the axis repeat the edge elements."""
            start = first - reach + 1

            def weights_of_parts(i: Scalar) -> tuple[Scalar, Scalar, Scalar]:
                weight = weight_of(start + i)
                return weight, s.where(start + i < 0, weight, 0.0), s.where(start + i >= size, weight, 0.0)

            whole, before, behind = maps.fold(SUMS, reach * 2, weights_of_parts)
            factor = 1.0 / whole

            def product(i: Scalar) -> tuple[Scalar]:
                index = start + i
                weight = (
                    weight_of(index)
                    + s.where(s.equal(index, 0), before, 0.0)
                    + s.where(s.equal(index, size - 1), behind, 0.0)
                ) * factor
                if dtype.bits <= 8:
                    weight = s.cast(round_half_away(weight * float(ONE_8_BIT)), DType.INT64)
                return (s.where((index >= 0) & (index < size), s.cast(element_at(index), weight.dtype) * weight, 0),)

            (total,) = maps.fold(SUMS, reach * 2, product)
            if dtype.bits <= 8:
                return s.cast(s.floor_divide(total + ONE_8_BIT // 2, ONE_8_BIT), real)
            return round_half_away(total)

        if by.antialias and dtype.is_integer:
            total, weights = rounded(), s.constant(1, real)
        elif by.antialias:
            total, weights = maps.fold(SUMS, reach * 2, lambda i: tap(i - reach + 1))
        else:
            taps = [tap(s.constant(k, DType.INT64)) for k in range(1 - by.support, 1 + by.support)]
            total, weights = (functools.reduce(operator.add, terms) for terms in zip(*taps, strict=True))
        if by.antialias or by.exclude_outside:
            total = total / weights
        if by.transformation == "tf_crop_and_resize":
            outside = (position < 0.0) | (position > s.cast(size - 1, real))
            total = s.where(outside, by.extrapolation, total)
        return from_real(total, dtype)

    return gather_map(ctx, shape, dtype, element)


def round_half_away(x: Scalar) -> Scalar:
    """Round a float to an integer, ties away from zero."""
    return s.where(x < 0.0, s.ceil(x - 0.5), s.floor(x + 0.5))


def from_real(x: Scalar, dtype: DType) -> Scalar:
    """Convert a weighted sum to ``dtype``; integers are truncated and clamped."""
    if dtype.is_integer:
        x = s.minimum(s.maximum(x, float(lowest(dtype))), float(highest(dtype)))
    return s.cast(x, dtype)


def _nearest_elements(
    ctx: Lowering, x: Tensor, axes: Sequence[Resampling], transformation: str, rounding: str, extrapolation: float
) -> Tensor:
    by_axis = {how.axis: how for how in axes}
    shape = [by_axis[axis].size if axis in by_axis else dim for axis, dim in enumerate(x.shape)]

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        source = maps.source(x)
        coordinates = list(c)
        inside = s.constant(True, DType.BOOL)
        for axis, how in by_axis.items():
            size = source.dim(axis)
            position = _original(transformation, maps, c[axis], size, maps.dim(how.size), how, DType.FLOAT32)
            coordinates[axis] = clamped(_nearest(rounding, position, how.scale(maps)), size)
            inside = inside & (position >= 0.0) & (position <= s.cast(size - 1, DType.FLOAT32))
        if transformation == "tf_crop_and_resize":
            return source.at(coordinates, inside, s.cast(s.constant(extrapolation, DType.FLOAT32), x.dtype))
        return source.at(coordinates)

    return gather_map(ctx, shape, x.dtype, element)


def _scaled(ctx: Lowering, x: Tensor, axes: Sequence[int], scales: Tensor) -> list[Resampling]:
    """Return the resampling of each axis by ``scales``; new sizes are the integer parts of float32 products."""
    dims = [x.shape[axis] for axis in axes]
    known = scales.constant if scales.is_constant else None
    if known is None:
        given = ctx.host_tensor(dims, [len(dims)], DType.INT64)

        def whole_size(n: Scalar, factor: Scalar) -> Scalar:
            whole = s.cast(s.floor(s.cast(n, DType.FLOAT32) * factor), DType.INT64)
            return s.where((factor > 0) & (factor < math.inf), whole, -1)

        sizes: list[Dim] = list(ctx.read_back(elementwise(ctx, whole_size, given, scales), "sizes of the result", -1))
        found = "0, a negative value, inf or NaN"
        for size in sizes:
            require.holds(ctx, le(0, size), "each of scales", "be positive and finite", found)
    else:
        sizes = [_scaled_size(ctx, dim, np.float32(f)) for dim, f in zip(dims, known.reshape(-1), strict=True)]
    unscaled = [False] * len(dims) if known is None else [bool(factor == 1) for factor in known.reshape(-1)]
    return [
        Resampling(axis, size, _number_at(ctx, scales, k), unscaled[k])
        for k, (axis, size) in enumerate(zip(axes, sizes, strict=True))
    ]


def _scaled_size(ctx: Lowering, dim: Dim, scale: np.float32) -> Dim:
    require.that(np.isfinite(scale) and scale > 0, "a scale", "be positive and finite", scale)
    exact = Fraction(float(scale))
    if not isinstance(dim, int):
        if exact.numerator <= SHORT_SCALE and exact.denominator <= 1 << 20:
            return floordiv(dim * exact.numerator, exact.denominator)
        # The float32 product may round, so no integer formula gives its floor: limit the plan to this size.
        ctx.guard(eq(dim, hint(dim)))
    return int(np.floor(np.float32(hint(dim)) * scale))


def _sized(ctx: Lowering, x: Tensor, axes: Sequence[int], sizes: Sequence[Dim], policy: str) -> list[Resampling]:
    """Return the resampling of each axis to ``sizes``; "not_larger" and "not_smaller" use one scale for all axes."""
    dims = [x.shape[axis] for axis in axes]
    ratios = list(zip(sizes, dims, strict=True))
    for size, dim in ratios:
        empty = eq(size, 0) if policy == "stretch" else 0
        require.holds(ctx, sym_max(dim, empty), "X", "have elements along the resized dimensions", "none")
    if policy in ("not_larger", "not_smaller"):
        p, q = ratios[0]
        for size, dim in ratios[1:]:
            smaller, larger = lt(size * q, p * dim), lt(p * dim, size * q)
            better = smaller if policy == "not_larger" else larger
            p, q = select(better, size, p), select(better, dim, q)
        sizes = [floordiv(2 * p * dim + q, 2 * q) for dim in dims]
        ratios = [(p, q)] * len(dims)
    require.one_of(("stretch", "not_larger", "not_smaller"), keep_aspect_ratio_policy=policy)

    def scale(size: Dim, dim: Dim) -> Callable[[IndexMap], Scalar]:
        return lambda maps: s.cast(maps.dim(size), DType.FLOAT32) / s.cast(maps.dim(dim), DType.FLOAT32)

    return [Resampling(axis, size, scale(p, q), p == q) for axis, size, (p, q) in zip(axes, sizes, ratios, strict=True)]


def _resize(
    ctx: Lowering, x: Tensor, axes: Sequence[Resampling], mode: str, by: Interpolation, rounding: str
) -> Tensor:
    if by.transformation != "tf_crop_and_resize":
        axes = [how for how in axes if not how.unscaled]
    if not axes:
        return x
    for how in axes:
        require.least_dim(ctx, 0, **{"each resized dimension": how.size})
    if mode == "nearest":
        return _nearest_elements(ctx, x, axes, by.transformation, rounding, by.extrapolation)
    require.one_of(("nearest", "linear", "cubic"), mode=mode)
    require.supported(x.dtype is not DType.BOOL, "dtype", "mode for X of type bool", repr(mode), "'nearest'")
    # With antialias, integers are rounded after each axis, last axis first, as in ONNX Runtime and Pillow.
    order = axes[::-1] if by.antialias else axes
    final, keeps_type = x.dtype, by.antialias and x.dtype.is_integer
    for how in order:
        dtype = final if keeps_type or how is order[-1] else s.accumulation_type(final)
        x = _interpolate(ctx, x, how, by, dtype)
    return x


def weight_of_mode(mode: str, a: float = -0.75) -> tuple[Callable[[Scalar], Scalar], int]:
    """Return the weight function of an interpolation mode, and its support; ``a`` is the parameter of "cubic"."""
    return (cubic(a), 2) if mode == "cubic" else (triangle, 1)


def _check_one_per_axis(given: Tensor, axes: int) -> None:
    """Check that ``given``, the input scales or sizes, has one element per axis."""
    count = require.static(given.size, "the number of scales or sizes")
    require.that(given.rank == 1 and count == axes, "scales or sizes", f"have the shape [{axes}]", list(given.shape))


@op("Upsample", since=9, until=9, types={"T": ALL_TENSORS})
@op("Resize", since=10, until=10, types={"T": ALL_TENSORS})
def resize_10(ctx: Lowering, x: T, scales: Float32, *, mode: str = "nearest") -> Tensor:
    mode = "linear" if mode == "bilinear" else mode
    _check_one_per_axis(scales, x.rank)
    axes = _scaled(ctx, x, range(x.rank), scales)
    return _resize(ctx, x, axes, mode, Interpolation(*weight_of_mode(mode), "asymmetric"), "simple")


@op("Upsample", since=1, until=6, types={"T": ALL_TENSORS})
def upsample_1(ctx: Lowering, x: T, *, height_scale: float, width_scale: float, mode: str = "nearest") -> Tensor:
    require.rank(4, X=x)
    return upsample_7(ctx, x, scales=(1.0, 1.0, height_scale, width_scale), mode=mode)


@op("Upsample", since=7, until=7, types={"T": ALL_TENSORS})
def upsample_7(ctx: Lowering, x: T, *, scales: tuple[float, ...], mode: str = "nearest") -> Tensor:
    return resize_10(ctx, x, ctx.constant(np.array(scales, np.float32)), mode=mode)


@op("Resize", since=11, types={"T1": ALL_TENSORS, "T2": NO_BFLOAT16})
def resize(
    ctx: Lowering,
    x: T1,
    roi: T2 | None = None,
    scales: Float32 | None = None,
    sizes: HostTensor | None = None,
    *,
    antialias: int = 0,
    axes: tuple[int, ...] | None = None,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
) -> Tensor:
    """Resize by ``scales`` or ``sizes``: exactly one of these inputs must be given and not empty."""
    chosen = normalize_axes(range(x.rank) if axes is None else axes, x.rank)
    # ONNX treats an empty optional input as omitted.
    roi, scales, sizes = (None if given is None or given.size == 0 else given for given in (roi, scales, sizes))
    given = scales if scales is not None else sizes
    if given is None or (scales is not None and sizes is not None):
        raise require.violation("either scales or sizes", "be given", "neither" if given is None else "both")
    _check_one_per_axis(given, len(chosen))
    if scales is not None:
        resampled = _scaled(ctx, x, chosen, scales)
    else:
        resampled = _sized(ctx, x, chosen, ctx.host_values(given, "sizes"), keep_aspect_ratio_policy)
    if coordinate_transformation_mode == "tf_crop_and_resize":
        resampled = _with_roi(ctx, resampled, chosen, roi)
    by = Interpolation(
        *weight_of_mode(mode, cubic_coeff_a), coordinate_transformation_mode, bool(antialias), bool(exclude_outside),
        extrapolation_value,
    )  # fmt: skip
    return _resize(ctx, x, resampled, mode, by, nearest_mode)


def _with_roi(ctx: Lowering, axes: Sequence[Resampling], chosen: Sequence[int], roi: Tensor | None) -> list[Resampling]:
    if roi is None or roi.size != 2 * len(chosen):
        expected = f"have {2 * len(chosen)} elements, a start and an end for each resized axis"
        raise require.violation("roi", expected, "none" if roi is None else roi.size)

    def bounds(k: int) -> Callable[[IndexMap], tuple[Scalar, Scalar]]:
        start, end = _number_at(ctx, roi, k), _number_at(ctx, roi, k + len(chosen))
        return lambda maps: (start(maps), end(maps))

    return [replace(how, roi=bounds(chosen.index(how.axis))) for how in axes]
