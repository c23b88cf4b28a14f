"""GEMMs with float4 and float8 operands.

Weight-only quantized GEMMs dequantize the weights in the operand loads. GemmFloat8 converts both operands to float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from ....kernels.elementwise.index_map import Loads
from ....kernels.gemm.grouped_gemm import BLOCK, Shared, Weights, group_rows, grouped_product
from ....model.ir import HALVES, DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import Dim, ceildiv, product
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import elementwise, full
from ....program.lowering.views import reshape
from ... import requirements as require
from ...layouts import as_number
from ...onnx.math.activation import gelu_tanh
from ...onnx.math.elementwise import cast
from ...onnx.math.matmul import gemm
from ...registry import FLOAT32, T1, T2, T3, TA, TB, TC, TS, UINT8, UP_TO_FLOAT32, T, contrib_op

E2M1: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""Values of float4e2m1 by code. A lookup takes fewer instructions per element than an expression."""

_FP4 = np.array([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4], np.float32)
FP4: Final = np.concatenate([_FP4, -_FP4])
"""Values of bitsandbytes' FP4 codes, in [-1, 1]."""
# fmt: off
NF4: Final = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)
# fmt: on
"""Values of bitsandbytes' NF4 codes, quantiles of a normal distribution."""


def _product(ctx: Lowering, a: Tensor, weights: Weights, width: Dim, bias: Tensor | None, dtype: DType) -> Tensor:
    """Return a @ weights + bias as ``dtype``: a grouped GEMM with one group."""
    require.least_rank(1, A=a)
    require.dim(ctx, -1, width, A=a)
    rows = product(a.shape[:-1])
    one = full(ctx, (rows,), 0, DType.INT32)
    total = grouped_product(
        ctx, group_rows(ctx, ctx.materialize(one), 1), reshape(ctx, a, [rows, width]), 1, weights, a.dtype
    )
    require.shape(ctx, (weights.columns,), bias=bias)
    if bias is None:
        result = cast(ctx, total, to=dtype.onnx)
    else:
        result = elementwise(ctx, lambda x, b: s.cast(x + s.widen(b), dtype), total, bias)
    return ctx.view(result, (*a.shape[:-1], weights.columns))


_Function = Callable[[Loads, Scalar, Scalar], Scalar]


def _scaled(columns: Dim, read: tuple[Tensor, ...], together: bool, scale: _Function, value: _Function) -> Weights:
    """Return weights whose elements are ``value(loads, column, k) * scale(loads, column, k)``.

    With ``together`` the elements of a column that a GEMM step loads share a scale.
    """

    def shared(loads: Loads, _: Scalar, column: Scalar, k: Scalar) -> Shared:
        return (scale(loads, column, k),) if together else ()

    def element(loads: Loads, _: Scalar, column: Scalar, k: Scalar, common: Shared) -> Scalar:
        return value(loads, column, k) * (common[0] if together else scale(loads, column, k))

    return Weights(columns, element, read, None, shared)


@contrib_op("MatMulBnb4", T1=UP_TO_FLOAT32, T2=UINT8)
def matmul_bnb4(
    ctx: Lowering,
    a: T1,
    b: T2,
    absmax: T1,
    *,
    K: int,
    N: int,
    block_size: int,
    quant_type: int,
    training_mode: int = 0,
    transB: int = 1,
) -> Tensor:
    """Return a @ B.T, or without ``transB`` a @ B, for codes B [N, K] with a scale per block of the flat matrix."""
    require.one_of((0, 1), quant_type=quant_type)
    require.least(1, N=N, K=K)
    require.block(block_size)
    require.size(ctx, (N * K + 1) // 2, B=b)
    require.size(ctx, ceildiv(N * K, block_size), absmax=absmax)
    table = ctx.constant(NF4 if quant_type else FP4)
    # Rows of whole bytes are addressed as rows, which takes fewer instructions than flat indices.
    whole = K % 2 == 0
    codes = reshape(ctx, b, [N, K // 2] if whole else [1, (N * K + 1) // 2])
    scales = reshape(ctx, absmax, [ceildiv(N * K, block_size)])

    def flat_index(column: Scalar, k: Scalar) -> Scalar:
        return column * K + k if transB else k * K + column

    def scale(loads: Loads, column: Scalar, k: Scalar) -> Scalar:
        return s.widen(loads.source(scales).at([flat_index(column, k) >> block_size.bit_length() - 1]))

    def value(loads: Loads, column: Scalar, k: Scalar) -> Scalar:
        # The first of two codes is in the high nibble.
        row, at = (column, k) if transB else (k, column)
        if not whole:
            row, at = s.constant(0, DType.INT64), flat_index(column, k)
        code = loads.code(loads.source(codes), row, at ^ 1, 4)
        return loads.source(table).at([s.cast(code, DType.INT64)])

    columns, width = (N, K) if transB else (K, N)
    weights = _scaled(columns, (codes, scales), bool(transB) and K % BLOCK == 0, scale, value)
    return _product(ctx, a, weights, width, None, a.dtype)


@contrib_op("MatMulBlockQuantizedFp4Weight", T=HALVES, T1=UINT8, T2=UINT8, T3=FLOAT32)
def matmul_fp4(
    ctx: Lowering,
    a: T,
    b: T1,
    weight_scale: T2,
    weight_scale_2: T3,
    input_scale: T3 | None = None,
    bias: T | None = None,
    *,
    block_size: int = 16,
) -> Tensor:
    """Return a @ B.T for B [N, K], two codes per byte, scales as bytes of float8e4m3fn. ``input_scale`` is unused."""
    require.rank(2, B=b)
    require.least(1, block_size=block_size)
    columns, width = b.shape[0], 2 * b.shape[1]
    require.shape(ctx, (columns, ceildiv(width, block_size)), weight_scale=weight_scale)
    require.scalar(ctx, weight_scale_2=weight_scale_2)
    table = ctx.constant(E2M1)
    x = weight_scale
    bytes_ = Tensor(DType.FLOAT8E4M3FN, x.shape, x.buffer, strides=x.strides, offset=x.offset)
    whole = ctx.view(weight_scale_2, (1,), (1,), weight_scale_2.offset)

    def scale(loads: Loads, column: Scalar, k: Scalar) -> Scalar:
        own = s.cast(loads.source(bytes_).at([column, s.trunc_divide(k, block_size)]), DType.FLOAT32)
        return own * loads.source(whole).at([s.constant(0, DType.INT64)])

    def value(loads: Loads, column: Scalar, k: Scalar) -> Scalar:
        code = loads.code(loads.source(b), column, k, 4)
        return loads.source(table).at([s.cast(code, DType.INT64)])

    weights = _scaled(columns, (b, weight_scale), block_size % BLOCK == 0, scale, value)
    return _product(ctx, a, weights, width, bias, a.dtype)


@contrib_op("MatMulBlockQuantizedFp8Weight", T=HALVES, T1=frozenset({DType.FLOAT8E4M3FN}), T2=FLOAT32)
def matmul_fp8(
    ctx: Lowering, a: T, b: T1, b_scale: T2, a_scale: T2 | None = None, bias: T | None = None, *, block_size: int = 128
) -> Tensor:
    """Return a @ B.T for B [N, K] with a scale per block of a row; with ``a_scale``, a is rounded to float8."""
    require.rank(2, B=b)
    require.least(1, block_size=block_size)
    columns, width = b.shape
    require.shape(ctx, (columns, ceildiv(width, block_size)), b_scale=b_scale)
    left = a
    if a_scale is not None:

        def rounded(x: Scalar, by: Scalar) -> Scalar:
            return s.cast(s.cast(s.widen(x) / by, DType.FLOAT8E4M3FN), DType.FLOAT32) * by

        left = elementwise(ctx, rounded, a, as_number(ctx, a_scale, "a_scale"))

    def scale(loads: Loads, column: Scalar, k: Scalar) -> Scalar:
        return loads.source(b_scale).at([column, s.trunc_divide(k, block_size)])

    def value(loads: Loads, column: Scalar, k: Scalar) -> Scalar:
        return s.cast(loads.source(b).at([column, k]), DType.FLOAT32)

    weights = _scaled(columns, (b, b_scale), block_size % BLOCK == 0, scale, value)
    return _product(ctx, left, weights, width, bias, a.dtype)


_EIGHT: Final = frozenset({DType.FLOAT8E4M3FN, DType.FLOAT8E5M2})
_ACTIVATIONS: Final[dict[str, Callable[[Scalar], Scalar]]] = {
    "NONE": lambda x: x,
    "RELU": lambda x: s.maximum(x, 0.0),
    "GELU": gelu_tanh,
}


@contrib_op(
    "GemmFloat8",
    TA=UP_TO_FLOAT32 | _EIGHT,
    TB=UP_TO_FLOAT32 | _EIGHT,
    TC=UP_TO_FLOAT32,
    TR=UP_TO_FLOAT32 | _EIGHT,
    TS=FLOAT32,
)
def gemm_float8(
    ctx: Lowering,
    a: TA,
    b: TB,
    c: TC | None = None,
    scale_a: TS | None = None,
    scale_b: TS | None = None,
    scale_y: TS | None = None,
    *,
    activation: str = "NONE",
    alpha: float = 1.0,
    beta: float = 0.0,
    dtype: int = 1,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    """Return scale_y * activation(alpha * (scale_a * a) @ (scale_b * b) + beta * c) as ``dtype``."""
    result = DType.of_attribute(dtype)
    require.that(result in UP_TO_FLOAT32 | _EIGHT, "dtype", "be a float of at most 32 bits", result.name)
    require.one_of(_ACTIVATIONS, activation=activation)
    finish = _ACTIVATIONS[activation]
    left, right = _real(ctx, a, scale_a), _real(ctx, b, scale_b)
    addend = None if c is None or beta == 0.0 else _real(ctx, c, None)
    total = gemm(ctx, left, right, addend, alpha=alpha, beta=beta, transA=transA, transB=transB)
    if scale_y is None:
        return elementwise(ctx, lambda x: s.cast(finish(x), result), total)
    return elementwise(ctx, lambda x, by: s.cast(finish(x) * by, result), total, as_number(ctx, scale_y))


def _real(ctx: Lowering, x: Tensor, scale: Tensor | None) -> Tensor:
    """Return x times its scale, in float32."""
    if scale is None:
        return cast(ctx, x, to=DType.FLOAT32.onnx)
    return elementwise(ctx, lambda value, by: s.cast(value, DType.FLOAT32) * by, x, as_number(ctx, scale))
