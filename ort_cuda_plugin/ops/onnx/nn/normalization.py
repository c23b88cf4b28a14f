"""Softmax and normalizations as row programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ....kernels.conv.pool import local_response_normalization
from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import floordiv
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.reduce import row_map
from ....program.lowering.views import reshape, unsqueeze
from ....program.steps.row_program import MAX, SUM, Row, arg_max
from ... import requirements as require
from ...axes import normalize_axes, normalize_axis
from ...layouts import per_channel
from ...registry import FLOATS, T, V, attributes_of, op

Outputs = tuple[Sequence[Scalar], Sequence[Scalar]]


def softmax_row(row: Row, x: Scalar) -> Outputs:
    e = s.exp(s.widen(x) - row.reduce(MAX, s.widen(x)))
    return [s.cast(e / row.reduce(SUM, e), x.dtype)], []


def stepwise_softmax_row(row: Row, x: Scalar) -> Outputs:
    """Compute Softmax as ONNX's function body since version 13: for float16, exponentials and sum round to float16.

    The sum accumulates in float32, and is not rounded if it would overflow float16. For bfloat16 only the result is
    rounded, since each rounding would add an error of 0.4 %.
    """
    if x.dtype is not DType.FLOAT16:
        return softmax_row(row, x)
    e = s.widen(s.cast(s.exp(s.widen(x) - row.reduce(MAX, s.widen(x))), x.dtype))
    total = row.reduce(SUM, e)
    rounded = s.widen(s.cast(total, x.dtype))
    return [s.cast(e / s.where(s.equal(rounded, math.inf), total, rounded), x.dtype)], []


def log_softmax_row(row: Row, x: Scalar) -> Outputs:
    shifted = s.widen(x) - row.reduce(MAX, s.widen(x))
    return [s.cast(shifted - s.log(row.reduce(SUM, s.exp(shifted))), x.dtype)], []


RowFunction = Callable[[Row, Scalar], Outputs]


def _softmax(name: str, row: RowFunction, row_13: RowFunction | None = None) -> None:
    """Register version 1 of an operator, over all dimensions from ``axis`` on, and version 13, along ``axis`` only."""

    @op(name, since=1, types={"T": FLOATS})
    def coerced(ctx: Lowering, x: Tensor, *, axis: int = 1) -> Tensor:
        # If the axis equals the rank, each element is a row.
        first = x.rank if axis == x.rank else normalize_axis(axis, x.rank)
        return row_map(ctx, row, range(first, x.rank), x)[0]

    @op(name, since=13, types={"T": FLOATS})
    def along_axis(ctx: Lowering, x: Tensor, *, axis: int = -1) -> Tensor:
        return row_map(ctx, row_13 or row, [normalize_axis(axis, x.rank)], x)[0]


def hardmax_row(row: Row, x: Scalar) -> Outputs:
    largest = row.reduce_all(arg_max(last=False), x, row.index)[1]
    return [s.where(s.equal(row.index, largest), s.constant(1.0, x.dtype), 0.0)], []


_softmax("Softmax", softmax_row, stepwise_softmax_row)
_softmax("LogSoftmax", log_softmax_row)
_softmax("Hardmax", hardmax_row)


@op("LpNormalization", since=1, types={"T": FLOATS})
def lp_normalization(ctx: Lowering, x: Tensor, *, axis: int = -1, p: int = 2) -> Tensor:
    """Divide each row by its p-norm; a row of zeros is unchanged."""
    require.one_of((1, 2), p=p)

    def program(row: Row, x: Scalar) -> Outputs:
        value = s.widen(x)
        norm = row.reduce(SUM, s.absolute(value)) if p == 1 else s.sqrt(row.reduce(SUM, value * value))
        return [s.cast(s.where(s.equal(norm, 0.0), 0.0, value / norm), x.dtype)], []

    return row_map(ctx, program, [normalize_axis(axis, x.rank)], x)[0]


def stash(x: Scalar, stash_type: int) -> Scalar:
    """Convert x to the compute type of a normalization: ``stash_type``, but at least float32."""
    dtype = DType(stash_type)
    return s.cast(x, dtype) if dtype is DType.FLOAT64 else s.widen(x)


def _check_stash(stash_type: int) -> None:
    expected = "be the ONNX number of a floating-point type, such as 1 for float32"
    require.that(stash_type in [dtype.onnx for dtype in FLOATS], "stash_type", expected, stash_type)


def layer_norm(
    ctx: Lowering,
    x: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    axes: Iterable[int],
    epsilon: float,
    stash_type: int,
    *,
    center: bool = True,
) -> tuple[Tensor, ...]:
    """Return normalized x, mean and reciprocal standard deviation along ``axes``; without ``center`` (RMS) mean is 0.

    A second pass computes the variance from differences, which avoids cancellation.
    """
    _check_stash(stash_type)

    def program(row: Row, x: Scalar, *affine: Scalar) -> Outputs:
        value = stash(x, stash_type)
        mean = row.mean(value) if center else s.constant(0.0, value.dtype)
        difference = value - mean if center else value
        reciprocal = 1.0 / s.sqrt(row.mean(difference * difference) + epsilon)
        # ONNX's function body rounds the product to x's type before it applies scale and bias.
        result = s.cast(difference * reciprocal, x.dtype)
        result = s.cast(result, affine[0].dtype) * affine[0]
        if len(affine) > 1:
            result = result + affine[1]
        return [s.cast(result, x.dtype)], [mean, reciprocal]

    affine = [scale] if bias is None else [scale, bias]
    return row_map(ctx, program, axes, x, *affine)


def _layer_norm_from(
    ctx: Lowering, x: Tensor, scale: Tensor, bias: Tensor | None = None, center: bool = True, *, axis: int = -1,
    epsilon: float = 1e-5, stash_type: int = 1,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Apply `layer_norm` over all dimensions from ``axis`` on."""
    axes = range(normalize_axis(axis, x.rank), x.rank)
    return layer_norm(ctx, x, scale, bias, axes, epsilon, stash_type, center=center)


@op("LayerNormalization", since=1, until=16, types={"T": FLOATS, "V": FLOATS})
@op("LayerNormalization", since=17, types={"T": FLOATS, "U": FLOATS}, names={"V": "T"})
@attributes_of(_layer_norm_from)
def layer_normalization(ctx: Lowering, x: T, scale: V, bias: V | None = None, **attributes: Any) -> tuple[Tensor, ...]:
    """Compute layer norm. ONNX Runtime's fusion inserts version 1, with the type V, in models of older opsets."""
    return _layer_norm_from(ctx, x, scale, bias, **attributes)


@op("SimplifiedLayerNormalization", since=1, types={"T": FLOATS, "V": FLOATS})
@attributes_of(_layer_norm_from)
def simplified_layer_normalization(ctx: Lowering, x: T, scale: V, **attributes: Any) -> tuple[Tensor, ...]:
    normalized, _, reciprocal = _layer_norm_from(ctx, x, scale, None, False, **attributes)
    return normalized, reciprocal


@op("RMSNormalization", since=23, types={"T": FLOATS, "V": FLOATS})
@attributes_of(_layer_norm_from)
def rms_normalization(ctx: Lowering, x: T, scale: V, **attributes: Any) -> Tensor:
    return _layer_norm_from(ctx, x, scale, None, False, **attributes)[0]


@op("InstanceNormalization", since=1, types={"T": FLOATS})
def instance_normalization(ctx: Lowering, x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    require.least_rank(3, input=x)
    affine = [per_channel(ctx, value, x.rank, name) for value, name in ((scale, "scale"), (bias, "B"))]
    return row_map(ctx, _normalized(epsilon, DType.FLOAT32.onnx), range(2, x.rank), x, *affine)[0]


def rms_normalized(row: Row, x: Scalar, epsilon: float, scale: Scalar | None = None) -> Scalar:
    """Return the RMS norm of x, times ``scale``, at least in float32."""
    value = s.widen(x)
    result = value / s.sqrt(row.mean(value * value) + epsilon)
    return result if scale is None else result * s.widen(scale)


def _normalized(epsilon: float, stash_type: int) -> Callable[[Row, Scalar, Scalar, Scalar], Outputs]:
    """Return the row program that normalizes x, then applies scale and bias, in the type of `stash`."""

    def program(row: Row, x: Scalar, scale: Scalar, bias: Scalar) -> Outputs:
        value = stash(x, stash_type)
        difference = value - row.mean(value)
        normalized = difference / s.sqrt(row.mean(difference * difference) + epsilon)
        return [s.cast(normalized * s.cast(scale, value.dtype) + s.cast(bias, value.dtype), x.dtype)], []

    return program


def standardized(ctx: Lowering, x: Tensor, axes: Iterable[int], *, scale: bool = True) -> Tensor:
    """Subtract the mean along ``axes``, and with ``scale`` divide by the standard deviation."""

    def program(row: Row, x: Scalar) -> Outputs:
        difference = s.widen(x) - row.mean(x)
        if not scale:
            return [s.cast(difference, x.dtype)], []
        deviation = s.sqrt(row.mean(difference * difference))
        return [s.cast(difference / (deviation + 1e-9), x.dtype)], []

    return row_map(ctx, program, axes, x)[0]


@op("MeanVarianceNormalization", since=9, types={"T": FLOATS})
def mean_variance_normalization(ctx: Lowering, x: Tensor, *, axes: tuple[int, ...] = (0, 2, 3)) -> Tensor:
    return standardized(ctx, x, normalize_axes(axes, x.rank))


def _group_norm(
    ctx: Lowering, x: Tensor, scale: Tensor, bias: Tensor, groups: int, epsilon: float, stash_type: int | None
) -> Tensor:
    """Normalize x [N, C, ...] per sample and group of channels.

    Scale and bias are per channel; if ``stash_type`` is None, which stands for float32, they are per group.
    """
    require.least_rank(2, X=x)
    require.least(1, num_groups=groups)
    size = groups if stash_type is None else x.shape[1]
    require.size(ctx, size, scale=scale, bias=bias)
    affine = [reshape(ctx, y, [groups, floordiv(size, groups)]) for y in (scale, bias)]
    stash_type = DType.FLOAT32.onnx if stash_type is None else stash_type
    _check_stash(stash_type)
    depth = floordiv(x.shape[1], groups)
    require.multiple_of(ctx, x.shape[1], groups, "the number of channels of X", "the number of groups")
    placed = [unsqueeze(ctx, y, range(2, x.rank)) for y in affine]
    grouped = reshape(ctx, x, [x.shape[0], groups, depth, *x.shape[2:]])
    result = row_map(ctx, _normalized(epsilon, stash_type), range(2, grouped.rank), grouped, *placed)[0]
    return ctx.view(result, x.shape)


@op("GroupNormalization", since=18, until=20, types={"T": FLOATS})
def group_normalization_18(
    ctx: Lowering, x: Tensor, scale: Tensor, bias: Tensor, *, num_groups: int, epsilon: float = 1e-5
) -> Tensor:
    """Normalize groups of channels, with scale and bias per group."""
    return _group_norm(ctx, x, scale, bias, num_groups, epsilon, None)


@op("GroupNormalization", since=21, types={"T": FLOATS})
def group_normalization_21(
    ctx: Lowering,
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    num_groups: int,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Tensor:
    """Normalize groups of channels, with scale and bias per channel."""
    return _group_norm(ctx, x, scale, bias, num_groups, epsilon, stash_type)


@op("LRN", since=1, types={"T": FLOATS})
def lrn(
    ctx: Lowering, x: T, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0
) -> Tensor:  # fmt: skip
    require.least_rank(2, X=x)
    require.least(1, size=size)
    return local_response_normalization(ctx, x, size=size, alpha=alpha, beta=beta, bias=bias)
