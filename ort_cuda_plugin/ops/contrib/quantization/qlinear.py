"""QLinear operators of com.microsoft: dequantize, an operator of ai.onnx, quantize."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import elementwise
from ....program.lowering.reduce import row_map
from ....program.lowering.views import permute, reshape, unsqueeze
from ... import requirements as require
from ...axes import normalize_axis
from ...layouts import as_number, with_channels_first
from ...onnx.math.activation import leaky_relu
from ...onnx.math.matmul import matrix_product
from ...onnx.nn.normalization import softmax_row
from ...onnx.nn.pooling import average_pool, global_average_pool
from ...onnx.nn.quantization import dequantize_linear, dynamic_quantize_linear, quantize_linear_10, shifted
from ...onnx.nn.recurrent import lstm, per_direction
from ...onnx.nn.windows import PoolAttributes
from ...onnx.tensor.slicing import concat
from ...registry import (
    BYTES,
    FLOAT32,
    FLOAT_OR_HALF,
    INT32,
    T1,
    T2,
    T3,
    T8,
    TA,
    TB,
    TC,
    TF,
    TV,
    TYZ,
    Float32,
    T,
    attributes_of,
    contrib_op,
)

# ---- conversions ----


def real_of(ctx: Lowering, x: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Dequantize x to float32, with per-tensor parameters."""
    return dequantize_linear(ctx, x, as_number(ctx, scale), None if zero is None else as_number(ctx, zero))


def code_of(ctx: Lowering, x: Tensor, scale: Tensor, zero: Tensor | None, dtype: DType) -> Tensor:
    """Quantize x to ``dtype``, with per-tensor parameters."""
    offset = None if zero is None else as_number(ctx, zero)
    return quantize_linear_10(ctx, x, as_number(ctx, scale), offset, output_dtype=dtype.onnx)


# ---- elementwise operators ----


def _binary(name: str, fn: Callable[[Scalar, Scalar], Scalar]) -> None:
    @contrib_op(name, T=BYTES)
    def function(
        ctx: Lowering,
        a: T,
        a_scale: Float32,
        a_zero_point: T | None,
        b: T,
        b_scale: Float32,
        b_zero_point: T | None,
        c_scale: Float32,
        c_zero_point: T | None = None,
    ) -> Tensor:
        left, right = real_of(ctx, a, a_scale, a_zero_point), real_of(ctx, b, b_scale, b_zero_point)
        return code_of(ctx, elementwise(ctx, fn, left, right), c_scale, c_zero_point, a.dtype)


_binary("QLinearAdd", lambda a, b: a + b)
_binary("QLinearMul", lambda a, b: a * b)


def _unary(name: str) -> Callable[[Callable[..., Tensor]], None]:
    """Register a QLinear operator with one input; the decorated function gets the dequantized input.

    The function's keyword parameters are the operator's attributes.
    """

    def enter(function: Callable[..., Tensor]) -> None:
        def quantized(
            ctx: Lowering,
            x: T,
            x_scale: Float32,
            x_zero_point: T | None,
            y_scale: Float32,
            y_zero_point: T | None = None,
            **attributes: Any,
        ) -> Tensor:
            real = function(ctx, real_of(ctx, x, x_scale, x_zero_point), **attributes)
            return code_of(ctx, real, y_scale, y_zero_point, x.dtype)

        quantized.__doc__ = function.__doc__
        contrib_op(name, T=BYTES)(attributes_of(function)(quantized))

    return enter


_unary("QLinearSigmoid")(lambda ctx, x: elementwise(ctx, s.sigmoid, x))


@_unary("QLinearLeakyRelu")
def _leaky_relu(ctx: Lowering, x: Tensor, *, alpha: float = 0.01) -> Tensor:
    return elementwise(ctx, lambda value: leaky_relu(value, alpha), x)


@_unary("QLinearSoftmax")
def _softmax(ctx: Lowering, x: Tensor, *, opset: int, axis: int = -1) -> Tensor:
    """Compute softmax along ``axis``; if the attribute ``opset`` is below 13, over all dimensions from ``axis`` on."""
    first = normalize_axis(axis, x.rank)
    return row_map(ctx, softmax_row, range(first, x.rank if opset < 13 else first + 1), x)[0]


@_unary("QLinearAveragePool")
def _average_pool(
    ctx: Lowering,
    x: Tensor,
    *,
    channels_last: int = 0,
    count_include_pad: int = 0,
    **attributes: Unpack[PoolAttributes],
) -> Tensor:
    def pool(first: Tensor) -> Tensor:
        return average_pool(ctx, first, count_include_pad=count_include_pad, **attributes)[0]

    return with_channels_first(ctx, x, pool, channels_last)


@_unary("QLinearGlobalAveragePool")
def _global_average_pool(ctx: Lowering, x: Tensor, *, channels_last: int = 0) -> Tensor:
    return with_channels_first(ctx, x, lambda first: global_average_pool(ctx, first), channels_last)


@contrib_op("QLinearConcat", T8=BYTES, TF=FLOAT32, TV=BYTES | FLOAT32)
def qlinear_concat(ctx: Lowering, y_scale: TF, y_zero_point: T8, *inputs: TV, axis: int) -> Tensor:
    """Concatenate inputs, each of which is followed by its scale and zero point."""
    are_triples = len(inputs) % 3 == 0 < len(inputs)
    require.that(are_triples, "inputs", "be triples of a tensor, its scale and its zero point", f"{len(inputs)} inputs")
    parts = []
    for x, scale, zero in zip(inputs[::3], inputs[1::3], inputs[2::3], strict=True):
        if not x.dtype.is_integer or not zero.dtype.is_integer or scale.dtype is not DType.FLOAT32:
            types = f"({x.dtype.short}, {scale.dtype.short}, {zero.dtype.short})"
            wanted = "be triples of integers, a float32 scale and an integer zero point"
            raise require.violation("inputs", wanted, types)
        parts.append(code_of(ctx, real_of(ctx, x, scale, zero), y_scale, y_zero_point, y_zero_point.dtype))
    return concat(ctx, *parts, axis=axis)


# ---- matrix products ----


def _of_columns(ctx: Lowering, x: Tensor, columns: Tensor) -> Tensor:
    """Check a parameter with one element or one per column; return it as a scalar or a vector."""
    require.supported(x.rank <= 1, "shape", "the rank of bias, or of B's scale or zero point,", x.rank, "0 and 1")
    width = columns.shape[-1]
    require.one_or_size(ctx, width, **{"each of B's scale and zero point, and bias,": x})
    return ctx.view(x, (), (), x.offset) if x.size == 1 else x


def scaled_product(
    ctx: Lowering,
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    a_zero: Tensor | None,
    b_zero: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Return (a - a_zero) @ (b - b_zero) * a_scale * b_scale + bias in the scales' type; accumulators are int32."""
    require.least_rank(1, B=b)
    left = shifted(ctx, a, None if a_zero is None else as_number(ctx, a_zero))
    right = shifted(ctx, b, None if b_zero is None else _of_columns(ctx, b_zero, b))
    total = matrix_product(ctx, left, right)

    def result(value: Scalar, x: Scalar, y: Scalar, *added: Scalar) -> Scalar:
        real = s.cast(value, DType.FLOAT32) * (s.widen(x) * s.widen(y))
        return s.cast(real + s.widen(added[0]) if added else real, a_scale.dtype)

    addends = [] if bias is None else [_of_columns(ctx, bias, b)]
    return elementwise(ctx, result, total, as_number(ctx, a_scale), _of_columns(ctx, b_scale, b), *addends)


@contrib_op("MatMulIntegerToFloat", T1=BYTES, T2=BYTES, T3=FLOAT_OR_HALF)
def matmul_integer_to_float(
    ctx: Lowering,
    a: T1,
    b: T2,
    a_scale: T3,
    b_scale: T3,
    a_zero_point: T1 | None = None,
    b_zero_point: T2 | None = None,
    bias: T3 | None = None,
) -> Tensor:
    return scaled_product(ctx, a, b, a_scale, b_scale, a_zero_point, b_zero_point, bias)


@contrib_op("DynamicQuantizeMatMul", T1=FLOAT32, T2=BYTES)
def dynamic_quantize_matmul(
    ctx: Lowering, a: T1, b: T2, b_scale: T1, b_zero_point: T2 | None = None, bias: T1 | None = None
) -> Tensor:
    codes, scale, zero = dynamic_quantize_linear(ctx, a)
    return scaled_product(ctx, codes, b, scale, b_scale, zero, b_zero_point, bias)


@contrib_op("QGemm", TA=BYTES, TB=BYTES, TC=INT32, T=FLOAT32, TYZ=BYTES)
def qgemm(
    ctx: Lowering,
    a: TA,
    a_scale: T,
    a_zero_point: TA,
    b: TB,
    b_scale: T,
    b_zero_point: TB,
    c: TC | None = None,
    y_scale: T | None = None,
    y_zero_point: TYZ | None = None,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    """Return alpha * a_scale * b_scale * (A @ B + C), for A and B minus zero points; with ``y_scale`` quantized."""
    require.rank(2, A=a, B=b)
    require.rank((0, 1, 2), C=c)
    a = permute(ctx, a, (1, 0)) if transA else a
    b = permute(ctx, b, (1, 0)) if transB else b
    columns = _of_columns(ctx, b_zero_point, b)
    total = matrix_product(ctx, shifted(ctx, a, as_number(ctx, a_zero_point)), shifted(ctx, b, columns))
    require.broadcast(ctx, total.shape, C=c)
    if c is not None:
        total = elementwise(ctx, lambda value, added: value + added, total, c)

    def real(value: Scalar, x: Scalar, y: Scalar) -> Scalar:
        return s.cast(value, DType.FLOAT32) * (alpha * x * y)

    result = elementwise(ctx, real, total, as_number(ctx, a_scale), _of_columns(ctx, b_scale, b))
    if y_scale is None:
        return result
    return code_of(ctx, result, y_scale, y_zero_point, DType.UINT8 if y_zero_point is None else y_zero_point.dtype)


# ---- recurrent ----


@contrib_op("DynamicQuantizeLSTM", T=FLOAT32, T1=INT32, T2=BYTES)
@attributes_of(per_direction)
def dynamic_quantize_lstm(
    ctx: Lowering,
    x: T,
    w: T2,
    r: T2,
    b: T | None,
    sequence_lens: T1 | None,
    initial_h: T | None,
    initial_c: T | None,
    p: T | None,
    w_scale: T,
    w_zero_point: T2,
    r_scale: T,
    r_zero_point: T2,
    *,
    input_forget: int = 0,
    **attributes: Any,
) -> tuple[Tensor, ...]:
    """Compute an LSTM with quantized weights; inputs and states stay float32."""
    return lstm(
        ctx,
        x,
        _recurrent_weights(ctx, w, w_scale, w_zero_point),
        _recurrent_weights(ctx, r, r_scale, r_zero_point),
        b,
        sequence_lens,
        initial_h,
        initial_c,
        p,
        input_forget=input_forget,
        **attributes,
    )


def _recurrent_weights(ctx: Lowering, codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Dequantize weights [directions, inputs, gates] to float32 [directions, gates, inputs]."""
    require.rank(3, **{"W and R": codes})
    directions, _, gates = codes.shape
    placed = []
    for x in (scale, zero):
        if x.rank == 2:
            require.shape(ctx, (directions, gates), **{"each scale and zero point of W and R": x})
            placed.append(unsqueeze(ctx, x, (1,)))
        else:
            require.size(ctx, directions, **{"each scale and zero point of W and R": x})
            placed.append(reshape(ctx, x, [directions, 1, 1]))

    def real(code: Scalar, factor: Scalar, offset: Scalar) -> Scalar:
        distance = s.cast(code, DType.INT32) - s.cast(offset, DType.INT32)
        return s.cast(distance, DType.FLOAT32) * factor

    return permute(ctx, elementwise(ctx, real, codes, *placed), (0, 2, 1))
