"""Softmax and normalizations: row programs, and the affine maps of inference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ort_cuda_plugin.graph.ir import Array, DType, InvalidModel, Unsupported
from ort_cuda_plugin.graph.lowering import Lowering, Tensor
from ort_cuda_plugin.kernels import scalar as s
from ort_cuda_plugin.kernels.elementwise import elementwise
from ort_cuda_plugin.kernels.reduce import row_map
from ort_cuda_plugin.kernels.row_program import MAX, SUM, Row
from ort_cuda_plugin.kernels.scalar import Scalar
from ort_cuda_plugin.ops.axes import normalize_axis
from ort_cuda_plugin.ops.registry import FLOATS, T1, T2, T, U, V, op

Outputs = tuple[Sequence[Scalar], Sequence[Scalar]]


def softmax_row(row: Row, x: Scalar) -> Outputs:
    e = s.exp(s.widen(x) - row.reduce(MAX, s.widen(x)))
    return [s.cast(e / row.reduce(SUM, e), x.dtype)], []


def log_softmax_row(row: Row, x: Scalar) -> Outputs:
    shifted = s.widen(x) - row.reduce(MAX, s.widen(x))
    return [s.cast(shifted - s.log(row.reduce(SUM, s.exp(shifted))), x.dtype)], []


def _softmax(name: str, row: Callable[[Row, Scalar], Outputs]) -> None:
    """Before version 13 all dimensions from ``axis`` on are one row; from then on only that axis is."""

    @op(name, since=1, types={"T": FLOATS})
    def coerced(ctx: Lowering, x: Tensor, *, axis: int = 1) -> Tensor:
        # The axis may be the rank: then each row is one element.
        first = x.rank if axis == x.rank else normalize_axis(axis, x.rank)
        return row_map(ctx, row, range(first, x.rank), x)[0]

    @op(name, since=13, types={"T": FLOATS})
    def along_axis(ctx: Lowering, x: Tensor, *, axis: int = -1) -> Tensor:
        return row_map(ctx, row, [normalize_axis(axis, x.rank)], x)[0]


_softmax("Softmax", softmax_row)
_softmax("LogSoftmax", log_softmax_row)


def stash(x: Scalar, stash_type: int) -> Scalar:
    """x in the type that a normalization computes in: ``stash_type``, but not narrower than float32."""
    dtype = DType(stash_type)
    return s.cast(x, dtype) if dtype is DType.FLOAT64 else s.widen(x)


def _check_stash(stash_type: int) -> None:
    if stash_type not in (DType.FLOAT32.onnx, DType.FLOAT64.onnx, DType.FLOAT16.onnx, DType.BFLOAT16.onnx):
        raise InvalidModel(f"stash_type {stash_type} is no floating-point type")


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
    """(normalized, mean, reciprocal standard deviation) along ``axes``; without ``center`` the mean is taken as 0.

    The variance is that of a second pass over differences from the mean, which does not cancel.
    """
    _check_stash(stash_type)

    def program(row: Row, x: Scalar, *affine: Scalar) -> Outputs:
        value = stash(x, stash_type)
        mean = row.mean(value) if center else s.constant(0.0, value.dtype)
        difference = value - mean if center else value
        reciprocal = 1.0 / s.sqrt(row.mean(difference * difference) + epsilon)
        # The product is rounded to x's type before scale and bias apply, as the operators' definitions have it.
        result = s.cast(difference * reciprocal, x.dtype)
        result = s.cast(result, affine[0].dtype) * affine[0]
        if len(affine) > 1:
            result = result + affine[1]
        return [s.cast(result, x.dtype)], [mean, reciprocal]

    affine = [scale] if bias is None else [scale, bias]
    return row_map(ctx, program, axes, x, *affine)


@op("LayerNormalization", since=17, types={"T": FLOATS, "U": FLOATS})
def layer_normalization(
    ctx: Lowering,
    x: T,
    scale: T,
    bias: T | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> tuple[Tensor, ...]:
    return layer_norm(ctx, x, scale, bias, range(normalize_axis(axis, x.rank), x.rank), epsilon, stash_type)


@op("LayerNormalization", since=1, until=16, types={"T": FLOATS, "V": FLOATS})
def contributed_layer_normalization(
    ctx: Lowering,
    x: T,
    scale: V,
    bias: V | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> tuple[Tensor, ...]:
    """What ORT's fusion makes in models of older opsets."""
    return layer_norm(ctx, x, scale, bias, range(normalize_axis(axis, x.rank), x.rank), epsilon, stash_type)


@op("SimplifiedLayerNormalization", since=1, types={"T": FLOATS, "V": FLOATS})
def simplified_layer_normalization(
    ctx: Lowering, x: T, scale: V, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> tuple[Tensor, ...]:
    axes = range(normalize_axis(axis, x.rank), x.rank)
    normalized, _, reciprocal = layer_norm(ctx, x, scale, None, axes, epsilon, stash_type, center=False)
    return normalized, reciprocal


@op("RMSNormalization", since=23, types={"T": FLOATS, "V": FLOATS})
def rms_normalization(
    ctx: Lowering, x: T, scale: V, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    axes = range(normalize_axis(axis, x.rank), x.rank)
    return layer_norm(ctx, x, scale, None, axes, epsilon, stash_type, center=False)[0]


def per_channel(ctx: Lowering, x: Tensor, rank: int) -> Tensor:
    """A vector with one element per channel as a tensor that broadcasts to (N, C, ...) of ``rank``."""
    if x.rank != 1:
        raise InvalidModel(f"a value per channel has rank {x.rank}, not 1")
    trailing = rank - 2
    return ctx.view(x, (*x.shape, *([1] * trailing)), (*x.strides, *([0] * trailing)), x.offset)


@op("InstanceNormalization", since=6, types={"T": FLOATS})
def instance_normalization(ctx: Lowering, x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    if x.rank < 3:
        raise InvalidModel(f"InstanceNormalization of a tensor of rank {x.rank}")
    affine = [per_channel(ctx, value, x.rank) for value in (scale, bias)]

    def program(row: Row, x: Scalar, scale: Scalar, bias: Scalar) -> Outputs:
        difference = s.widen(x) - row.mean(x)
        normalized = difference / s.sqrt(row.mean(difference * difference) + epsilon)
        return [s.cast(normalized * s.widen(scale) + s.widen(bias), x.dtype)], []

    return row_map(ctx, program, range(2, x.rank), x, *affine)[0]


def _folded_batch_norm(
    ctx: Lowering, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, epsilon: float
) -> tuple[Tensor, Tensor] | None:
    """Factor and offset per channel where they can be computed once: from constants of a type that is wide enough."""
    parameters = (scale, bias, mean, variance)
    wide = (DType.FLOAT32, DType.FLOAT64)
    if not all(x.is_constant and x.dtype is scale.dtype and x.shape == scale.shape for x in parameters):
        return None
    if scale.dtype not in wide or not all(isinstance(dim, int) for dim in scale.shape):
        return None

    def factor(scale: Array) -> Array:
        assert variance.constant is not None
        result: Array = scale / np.sqrt(variance.constant.astype(np.float64) + epsilon)
        return result.astype(scale.dtype)

    def offset(scale: Array) -> Array:
        assert bias.constant is not None
        assert mean.constant is not None
        result: Array = bias.constant - mean.constant * factor(scale).astype(np.float64)
        return result.astype(scale.dtype)

    key = epsilon, *((x.buffer.data, x.offset, x.strides) for x in parameters)
    shape = scale.static_shape
    return (
        ctx.derived(scale, ("batch norm factor", key), shape, factor),
        ctx.derived(scale, ("batch norm offset", key), shape, offset),
    )


def batch_norm(
    ctx: Lowering, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, epsilon: float
) -> Tensor:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias, each per channel (axis 1)."""
    rank = max(x.rank, 2)
    folded = _folded_batch_norm(ctx, scale, bias, mean, variance, epsilon)
    if folded is not None and x.dtype is scale.dtype:
        factor, offset = (per_channel(ctx, value, rank) for value in folded)
        return elementwise(ctx, lambda x, factor, offset: x * factor + offset, x, factor, offset)
    channels = [per_channel(ctx, value, rank) for value in (scale, bias, mean, variance)]

    def apply(x: Scalar, scale: Scalar, bias: Scalar, mean: Scalar, variance: Scalar) -> Scalar:
        compute = DType.FLOAT64 if DType.FLOAT64 in (x.dtype, scale.dtype, mean.dtype) else DType.FLOAT32
        value, scale, bias, mean, variance = (s.cast(a, compute) for a in (x, scale, bias, mean, variance))
        factor = scale / s.sqrt(variance + epsilon)
        return s.cast((value - mean) * factor + bias, x.dtype)

    return elementwise(ctx, apply, x, *channels)


@op("BatchNormalization", since=7, types={"T": FLOATS})
def batch_normalization_7(
    ctx: Lowering,
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    variance: Tensor,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    spatial: int = 1,
) -> Tensor:
    """``spatial`` ended with version 9. More than one output means training."""
    if not spatial:
        raise Unsupported("attribute", "BatchNormalization with spatial=0")
    return batch_norm(ctx, x, scale, bias, mean, variance, epsilon)


def _batch_norm_inference(
    ctx: Lowering,
    x: Tensor,
    parameters: tuple[Tensor, Tensor, Tensor, Tensor],
    epsilon: float,
    training_mode: int,
) -> Tensor:
    if training_mode:
        raise Unsupported("attribute", "BatchNormalization in training mode")
    return batch_norm(ctx, x, *parameters, epsilon)


@op("BatchNormalization", since=14, types={"T": FLOATS, "U": FLOATS})
def batch_normalization_14(
    ctx: Lowering,
    x: T,
    scale: T,
    bias: T,
    mean: U,
    variance: U,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
) -> Tensor:
    return _batch_norm_inference(ctx, x, (scale, bias, mean, variance), epsilon, training_mode)


@op("BatchNormalization", since=15, types={"T": FLOATS, "T1": FLOATS, "T2": FLOATS})
def batch_normalization_15(
    ctx: Lowering,
    x: T,
    scale: T1,
    bias: T1,
    mean: T2,
    variance: T2,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
) -> Tensor:
    return _batch_norm_inference(ctx, x, (scale, bias, mean, variance), epsilon, training_mode)
