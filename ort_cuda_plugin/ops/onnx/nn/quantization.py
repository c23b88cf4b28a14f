"""Quantization: QuantizeLinear, DequantizeLinear, and integer MatMul and Conv.

A quantized x represents (x - zero_point) * scale. MatMul and Conv subtract zero points, then multiply in int32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

from ....kernels.elementwise.index_map import IndexMap, gather_map
from ....model.ir import FLOATS_8, DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import ceildiv, eq
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import elementwise
from ....program.lowering.reduce import row_map
from ....program.lowering.views import unsqueeze
from ....program.steps.row_program import MAX, MIN, Row
from ... import requirements as require
from ...axes import normalize_axis
from ...registry import BYTES, FLOAT32, INT32, PACKED, T1, T2, T3, T4, TS, attributes_of, contrib_op, op
from ..math.matmul import matmul
from .conv import conv
from .windows import ConvAttributes

QUANTIZED = BYTES | {DType.INT16, DType.UINT16} | FLOATS_8 | PACKED
SCALES = frozenset({DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})
POWERS_OF_TWO = frozenset({DType.FLOAT8E8M0})
_INTEGERS = BYTES | {DType.INT16, DType.UINT16, DType.INT4, DType.UINT4}


def _limits(dtype: DType) -> tuple[int, int]:
    bits = dtype.bits
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if dtype.short[0] == "i" else (0, (1 << bits) - 1)


def saturate(x: Scalar, dtype: DType) -> Scalar:
    """Convert an integral float32 to ``dtype`` (2 to 16 bits), clamped; NaN becomes the minimum."""
    low, high = _limits(dtype)
    not_low = s.where(x > low, x, low)
    # Clamped values fit int32, whose conversion takes one instruction.
    return s.cast(s.cast(s.where(not_low < high, not_low, high), DType.INT32), dtype)


def _float32(x: Scalar) -> Scalar:
    return s.cast(x, DType.FLOAT32)


def _quantized(x: Scalar, zero: Scalar | None, dtype: DType, saturates: bool = True) -> Scalar:
    """Quantize x, already divided by its scale: round half to even, then add the zero point.

    For an 8-bit float the zero point is added before rounding; ``saturates`` concerns 8-bit floats only.
    """
    if dtype.is_float:
        return s.cast(x if zero is None else x + _float32(zero), dtype, saturate=saturates)
    rounded = s.round_half_even(x)
    return saturate(rounded if zero is None else rounded + _float32(zero), dtype)


def _by_groups(
    ctx: Lowering,
    fn: Callable[..., Scalar],
    dtype: DType,
    x: Tensor,
    parameters: Sequence[Tensor],
    axis: int,
    block_size: int,
) -> Tensor:
    """Return ``fn(x, *parameters)`` of each element, as ``dtype``.

    A parameter is per tensor, per index of ``axis``, or with ``block_size`` per block along ``axis``.
    """
    if block_size == 0:
        placed = []
        for parameter in parameters:
            require.rank((0, 1), **{"scale and zero point without a block_size": parameter})
            if parameter.size != 1:
                parameter = unsqueeze(ctx, parameter, range(1, x.rank - normalize_axis(axis, x.rank)))
            placed.append(_scalar(ctx, parameter))
        return elementwise(ctx, fn, x, *placed)
    along = normalize_axis(axis, x.rank)
    require.least(0, block_size=block_size)
    for parameter in parameters:
        require.rank(x.rank, **{"scale and zero point of blocks": parameter})
        for i, (dim, size) in enumerate(zip(parameter.shape, x.shape, strict=True)):
            wanted = ceildiv(size, block_size) if i == along else size
            expected = f"have the size {wanted!r} in dimension {i}"
            require.holds(ctx, eq(dim, wanted), "scale and zero point of blocks", expected, dim)

    def element(maps: IndexMap, at: list[Scalar]) -> Scalar:
        block = [*at[:along], s.trunc_divide(at[along], block_size), *at[along + 1 :]]
        return fn(maps.source(x).at(at), *(maps.source(p).at(block) for p in parameters))

    return gather_map(ctx, x.shape, dtype, element)


def _element_type(attribute: str, number: int, served: frozenset[DType]) -> DType:
    dtype = next((d for d in served if d.onnx == number), None)
    if dtype is None:
        known = ", ".join(sorted(d.short for d in served))
        raise require.unsupported("dtype", attribute, f"{number} of TensorProto.DataType", known)
    return dtype


def _quantize(
    ctx: Lowering, x: Tensor, scale: Tensor, zero: Tensor | None, precision: int, *, axis: int = 1, saturate: int = 1,
    block_size: int = 0, output_dtype: int = 0,
) -> Tensor:  # fmt: skip
    """Quantize x; ``precision`` is the type of the division by the scale, 0 for float32."""
    dtype = _element_type("output_dtype", output_dtype or DType.UINT8.onnx, QUANTIZED) if zero is None else zero.dtype
    if output_dtype and output_dtype != dtype.onnx:
        raise require.violation("output_dtype", f"be {dtype.onnx}, the zero point's type {dtype.name}", output_dtype)
    divided = _element_type("precision", precision, SCALES) if precision else DType.FLOAT32

    def fn(value: Scalar, factor: Scalar, offset: Scalar | None = None) -> Scalar:
        quotient = s.cast(_float32(value) / _float32(factor), divided)
        return _quantized(_float32(quotient), offset, dtype, saturate != 0)

    return _by_groups(ctx, fn, dtype, x, [scale] if zero is None else [scale, zero], axis, block_size)


@contrib_op("QuantizeLinear", T1=SCALES - {DType.BFLOAT16}, T2=_INTEGERS)
@op("QuantizeLinear", since=10, types={"T1": SCALES | INT32, "T2": QUANTIZED})
@attributes_of(_quantize)
def quantize_linear_10(ctx: Lowering, x: T1, y_scale: T1, y_zero_point: T2 | None = None, **attributes: Any) -> Tensor:
    """Quantize x with a division in float32, as in the CPU provider; ONNX leaves its precision undefined."""
    return _quantize(ctx, x, y_scale, y_zero_point, 0, **attributes)


@op(
    "QuantizeLinear",
    since=23,
    types={"T1": SCALES | INT32, "T2": SCALES | INT32 | POWERS_OF_TWO, "T3": QUANTIZED},
)
@attributes_of(_quantize)
def quantize_linear(
    ctx: Lowering,
    x: T1,
    y_scale: T2,
    y_zero_point: T3 | None = None,
    *,
    precision: int = 0,
    **attributes: Any,
) -> Tensor:
    """Quantize x; ``precision`` defaults to the scale's type, as ONNX defines."""
    if not precision and y_scale.dtype in SCALES:
        precision = y_scale.dtype.onnx
    return _quantize(ctx, x, y_scale, y_zero_point, precision, **attributes)


@contrib_op("DequantizeLinear", T1=_INTEGERS | INT32, T2=SCALES - {DType.BFLOAT16})
@op("DequantizeLinear", since=10, types={"T": QUANTIZED | INT32}, names={"T1": "T"})
@op("DequantizeLinear", since=19, types={"T1": QUANTIZED | INT32, "T2": SCALES | POWERS_OF_TWO})
def dequantize_linear(
    ctx: Lowering,
    x: T1,
    x_scale: T2,
    x_zero_point: T1 | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
) -> Tensor:
    dtype = _element_type("output_dtype", output_dtype or x_scale.dtype.onnx, SCALES)

    def fn(value: Scalar, factor: Scalar, offset: Scalar | None = None) -> Scalar:
        exact = DType.FLOAT32 if value.dtype.is_float else DType.INT32
        distance = s.cast(value, exact) if offset is None else s.cast(value, exact) - s.cast(offset, exact)
        return s.cast(_float32(distance) * _float32(factor), dtype)

    parameters = [x_scale] if x_zero_point is None else [x_scale, x_zero_point]
    return _by_groups(ctx, fn, dtype, x, parameters, axis, block_size)


@op("DynamicQuantizeLinear", since=11, types={"T1": FLOAT32})
def dynamic_quantize_linear(ctx: Lowering, x: T1) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize x to uint8; the scale is 1 if all elements are 0, as in ONNX Runtime."""

    def fit(row: Row, value: Scalar) -> tuple[list[Scalar], list[Scalar]]:
        low, high = s.minimum(row.reduce(MIN, value), 0.0), s.maximum(row.reduce(MAX, value), 0.0)
        scale = s.where(s.equal(low, high), 1.0, (high - low) / 255.0)
        return [], [scale, saturate(s.round_half_even(-low / scale), DType.UINT8)]

    scale, zero = (ctx.view(y, (), (), y.offset) for y in row_map(ctx, fit, range(x.rank), x))
    y = elementwise(ctx, lambda value, factor, offset: _quantized(value / factor, offset, DType.UINT8), x, scale, zero)
    return y, scale, zero


def _per_row(ctx: Lowering, x: Tensor) -> Tensor:
    """View a per-row parameter of a matrix so that it broadcasts to the matrix."""
    return unsqueeze(ctx, x, [1]) if x.rank == 1 and x.size != 1 else x


def shifted(ctx: Lowering, x: Tensor, zero: Tensor | None, dtype: DType = DType.INT32) -> Tensor:
    """Return x - zero as ``dtype``, in the shape of x."""
    if zero is None:
        return elementwise(ctx, lambda value: s.cast(value, dtype), x)
    zero = _scalar(ctx, zero)
    require.that(zero.rank <= x.rank, "the zero point", f"have at most rank {x.rank}", f"rank {zero.rank}")
    return elementwise(ctx, lambda value, offset: s.cast(value, dtype) - s.cast(offset, dtype), x, zero)


@op("MatMulInteger", since=10, types={"T1": BYTES, "T2": BYTES})
def matmul_integer(
    ctx: Lowering, a: T1, b: T2, a_zero_point: T1 | None = None, b_zero_point: T2 | None = None
) -> Tensor:
    return _product(ctx, a, b, a_zero_point, b_zero_point, DType.INT32)


def _product(ctx: Lowering, a: Tensor, b: Tensor, a_zero: Tensor | None, b_zero: Tensor | None, dtype: DType) -> Tensor:
    """Return (a - a_zero) @ (b - b_zero), computed in ``dtype``.

    A zero point is a scalar; a's may also have one element per row of a, b's one per column of b.
    """
    rows = None if a_zero is None else _per_row(ctx, a_zero)
    return matmul(ctx, shifted(ctx, a, rows, dtype), shifted(ctx, b, b_zero, dtype))


def _requantize(ctx: Lowering, x: Tensor, *parameters: Tensor) -> Tensor:
    """Scale and quantize the accumulators x.

    ``parameters``, which broadcast to x, are the scales of a, b and y, y's zero point, and optionally a bias.
    """

    def fn(value: Scalar, a: Scalar, b: Scalar, y: Scalar, zero: Scalar, *added: Scalar) -> Scalar:
        total = value + added[0] if added else value
        return _quantized(_float32(total) * (_float32(a) * _float32(b) / _float32(y)), zero, zero.dtype)

    return elementwise(ctx, fn, x, *parameters)


def _scalar(ctx: Lowering, x: Tensor) -> Tensor:
    return ctx.view(x, (), (), x.offset) if x.size == 1 else x


@op("QLinearMatMul", since=10, types=dict.fromkeys(("T1", "T2", "T3"), BYTES | FLOATS_8) | {"TS": SCALES})
def qlinear_matmul(
    ctx: Lowering,
    a: T1,
    a_scale: TS,
    a_zero_point: T1,
    b: T2,
    b_scale: TS,
    b_zero_point: T2,
    y_scale: TS,
    y_zero_point: T3,
) -> Tensor:
    exact = DType.FLOAT32 if a.dtype.is_float or b.dtype.is_float else DType.INT32
    total = _product(ctx, a, b, a_zero_point, b_zero_point, exact)
    a_rows, y_rows, zeros = (_scalar(ctx, _per_row(ctx, x)) for x in (a_scale, y_scale, y_zero_point))
    return _requantize(ctx, total, a_rows, _scalar(ctx, b_scale), y_rows, zeros)


def _per_channel(ctx: Lowering, x: Tensor, after: int) -> Tensor:
    """View a scalar or per-channel parameter so that it broadcasts; ``after`` dimensions follow the channels."""
    if x.size == 1:
        return _scalar(ctx, x)
    require.rank(1, **{"each scale, zero point and bias per channel": x})
    return unsqueeze(ctx, x, range(1, after + 1))


@op("ConvInteger", since=10, types={"T1": BYTES, "T2": BYTES})
def conv_integer(
    ctx: Lowering,
    x: T1,
    w: T2,
    x_zero_point: T1 | None = None,
    w_zero_point: T2 | None = None,
    **attributes: Unpack[ConvAttributes],
) -> Tensor:
    weights_zero = None if w_zero_point is None else _per_channel(ctx, w_zero_point, w.rank - 1)
    return conv(ctx, shifted(ctx, x, x_zero_point), shifted(ctx, w, weights_zero), **attributes)


@op("QLinearConv", since=10, types={"T1": BYTES, "T2": BYTES, "T3": BYTES, "T4": INT32})
def qlinear_conv(
    ctx: Lowering,
    x: T1,
    x_scale: Tensor,
    x_zero_point: T1,
    w: T2,
    w_scale: Tensor,
    w_zero_point: T2,
    y_scale: Tensor,
    y_zero_point: T3,
    b: T4 | None = None,
    **attributes: Unpack[ConvAttributes],
) -> Tensor:
    total = conv_integer(ctx, x, w, x_zero_point, w_zero_point, **attributes)
    parameters = [x_scale, w_scale, y_scale, y_zero_point, *([] if b is None else [b])]
    return _requantize(ctx, total, *(_per_channel(ctx, p, total.rank - 2) for p in parameters))
