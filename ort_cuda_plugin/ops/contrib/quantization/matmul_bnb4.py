"""Weight-only quantised GEMM with float4 and float8 codes, dequantised in the operand loads."""

from __future__ import annotations

from collections.abc import Callable

from ort_cuda_plugin.kernels.elementwise.index_map import Loads
from ort_cuda_plugin.kernels.gemm.grouped_gemm import BLOCK, Shared, Weights, group_rows, grouped_product
from ort_cuda_plugin.model.ir import HALVES, DType
from ort_cuda_plugin.ops import requirements as require
from ort_cuda_plugin.ops.contrib.quantization.small_codes import E2M1, FP4, NF4
from ort_cuda_plugin.ops.layouts import as_number
from ort_cuda_plugin.ops.registry import FLOAT32, T1, T2, T3, UINT8, UP_TO_FLOAT32, T, contrib_op
from ort_cuda_plugin.program.expressions import scalar as s
from ort_cuda_plugin.program.expressions.scalar import Scalar
from ort_cuda_plugin.program.expressions.symbolic import Dim, ceildiv, product
from ort_cuda_plugin.program.lowering.context import Lowering, Tensor
from ort_cuda_plugin.program.lowering.elementwise import elementwise, full
from ort_cuda_plugin.program.lowering.views import reshape


def _product(ctx: Lowering, a: Tensor, weights: Weights, width: Dim, bias: Tensor | None, dtype: DType) -> Tensor:
    """Return a @ weights + bias as ``dtype``: a grouped GEMM with one group."""
    require.least_rank(1, A=a)
    require.dim(ctx, -1, width, A=a)
    rows = product(a.shape[:-1])
    one = full(ctx, (rows,), 0, DType.INT32)
    total = grouped_product(
        ctx, group_rows(ctx, ctx.materialize(one), 1), reshape(ctx, a, [rows, width]), 1, weights, a.dtype
    )
    if bias is None:
        result = elementwise(ctx, lambda x: s.cast(x, dtype), total)
    else:
        require.shape(ctx, (weights.columns,), bias=bias)
        result = elementwise(ctx, lambda x, b: s.cast(x + s.widen(b), dtype), total, bias)
    return ctx.view(result, (*a.shape[:-1], weights.columns))


def _blocked(
    columns: Dim,
    read: tuple[Tensor, ...],
    block: int,
    scale: Callable[[Loads, Scalar, Scalar], Scalar],
    value: Callable[[Loads, Scalar, Scalar], Scalar],
) -> Weights:
    """Return weights whose elements are ``value(loads, column, k) * scale(loads, column, k // block)``."""
    together = block % BLOCK == 0

    def scale_at(loads: Loads, column: Scalar, k: Scalar) -> Scalar:
        return scale(loads, column, s.trunc_divide(k, block))

    def shared(loads: Loads, _: Scalar, column: Scalar, k: Scalar) -> Shared:
        return (scale_at(loads, column, k),) if together else ()

    def element(loads: Loads, _: Scalar, column: Scalar, k: Scalar, common: Shared) -> Scalar:
        return value(loads, column, k) * (common[0] if together else scale_at(loads, column, k))

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
    together = bool(transB) and K % BLOCK == 0

    def flat_index(column: Scalar, k: Scalar) -> Scalar:
        return column * K + k if transB else k * K + column

    def scale(loads: Loads, column: Scalar, k: Scalar) -> Scalar:
        return s.widen(loads.source(scales).at([flat_index(column, k) >> block_size.bit_length() - 1]))

    def shared(loads: Loads, _: Scalar, column: Scalar, k: Scalar) -> Shared:
        return (scale(loads, column, k),) if together else ()

    def element(loads: Loads, _: Scalar, column: Scalar, k: Scalar, common: Shared) -> Scalar:
        # The first of two codes is in the high nibble.
        row, at = (column, k) if transB else (k, column)
        if not whole:
            row, at = s.constant(0, DType.INT64), flat_index(column, k)
        code = loads.code(loads.source(codes), row, at ^ 1, 4)
        value = loads.source(table).at([s.cast(code, DType.INT64)])
        return value * (common[0] if together else scale(loads, column, k))

    columns, width = (N, K) if transB else (K, N)
    return _product(ctx, a, Weights(columns, element, (codes, scales), None, shared), width, None, a.dtype)


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

    def scale(loads: Loads, column: Scalar, block: Scalar) -> Scalar:
        own = s.cast(loads.source(bytes_).at([column, block]), DType.FLOAT32)
        return own * loads.source(whole).at([s.constant(0, DType.INT64)])

    def value(loads: Loads, column: Scalar, k: Scalar) -> Scalar:
        code = loads.code(loads.source(b), column, k, 4)
        return loads.source(table).at([s.cast(code, DType.INT64)])

    return _product(ctx, a, _blocked(columns, (b, weight_scale), block_size, scale, value), width, bias, a.dtype)


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

    def scale(loads: Loads, column: Scalar, block: Scalar) -> Scalar:
        return loads.source(b_scale).at([column, block])

    def value(loads: Loads, column: Scalar, k: Scalar) -> Scalar:
        return s.cast(loads.source(b).at([column, k]), DType.FLOAT32)

    return _product(ctx, left, _blocked(columns, (b, b_scale), block_size, scale, value), width, bias, a.dtype)
