"""Weight-only quantized GEMM and gather: packed integer codes of 2 to 8 bits, with a scale per block.

A GEMM loads the packed weights and dequantizes them in its prologue. Where a separate map must dequantize constant
weights, constant folding runs it once, before the first Run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ....kernels.elementwise.index_map import IndexMap, gather_map
from ....model.ir import FLOATS_8, DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import ceildiv, eq, logical_or
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import elementwise
from ....program.lowering.views import part, permute, reshape, unsqueeze
from ....program.steps.steps import Conversion
from ....program.steps.tensor import BufferKind
from ... import requirements as require
from ...axes import normalize_axis
from ...onnx.math.matmul import affine
from ...onnx.tensor.indexing import wrapped
from ...registry import INDICES, INT32, T1, T2, T3, T4, UINT8, UP_TO_FLOAT32, Tind, contrib_op

WIDTHS = (2, 4, 8)


def _unpacked(ctx: Lowering, x: Tensor, bits: int) -> Tensor:
    """Unpack the codes in the bytes of x to int32, lowest bits first, along a new last dimension."""
    per_byte = 8 // bits
    bytes_ = unsqueeze(ctx, x, (x.rank,))
    if per_byte == 1:
        return elementwise(ctx, lambda code: s.cast(code, DType.INT32), bytes_)
    shifts = ctx.constant(np.arange(0, 8, bits, dtype=np.int32))
    mask = (1 << bits) - 1
    return elementwise(ctx, lambda byte, shift: (s.cast(byte, DType.INT32) >> shift) & mask, bytes_, shifts)


@contrib_op("MatMulNBits", T1=UP_TO_FLOAT32, T2=UINT8, T3=UP_TO_FLOAT32 | UINT8, T4=INT32)
def matmul_nbits(
    ctx: Lowering,
    a: T1,
    b: T2,
    scales: T1,
    zero_points: T3 | None = None,
    g_idx: T4 | None = None,
    bias: T1 | None = None,
    *,
    K: int,
    N: int,
    accuracy_level: int = 0,
    bits: int = 4,
    block_size: int,
    weight_prepacked: int = 0,
) -> Tensor:
    """Return a @ ((b - zero_points) * scales) + bias. ``accuracy_level``, a permitted loss of accuracy, is unused.

    ``g_idx`` maps each row of the weights to its block, that is, its scale and zero point.
    """
    if bits not in WIDTHS or weight_prepacked:
        wanted = f"bits among {WIDTHS} with weight_prepacked = 0"
        raise require.unsupported("attribute", "(bits, weight_prepacked)", (bits, weight_prepacked), wanted)
    require.least(1, N=N, K=K)
    require.block(block_size)
    require.least_rank(1, A=a)
    blocks = -(-K // block_size)
    require.size(ctx, N * blocks * (block_size * bits // 8), B=b)
    require.size(ctx, N * blocks, scales=scales)
    parameters = [reshape(ctx, scales, [N, blocks])]
    if zero_points is not None:
        parameters.append(_zero_points(ctx, zero_points, N, blocks, bits))
    default = 1 << (bits - 1)

    def number(code: Scalar, scale: Scalar, zero: Scalar | None = None) -> Scalar:
        offset = s.constant(float(default), DType.FLOAT32) if zero is None else s.cast(zero, DType.FLOAT32)
        return s.cast((s.cast(code, DType.FLOAT32) - offset) * s.widen(scale), a.dtype)

    left = a if a.rank > 1 else unsqueeze(ctx, a, (0,))
    words = None if g_idx is not None else _words(b, K, N, blocks * block_size, bits)
    if words is not None:
        conversion = _conversion(ctx, number, parameters, bits, block_size)
        return ctx.view(affine(ctx, left, words, bias, conversion), (*a.shape[:-1], N))
    codes = _unpacked(ctx, reshape(ctx, b, [N, blocks, block_size * bits // 8]), bits)
    if g_idx is None:
        # codes: [N, blocks, bytes of a block, codes of a byte]
        weights = elementwise(ctx, number, codes, *(unsqueeze(ctx, p, (2, 3)) for p in parameters))
        rows = part(ctx, reshape(ctx, weights, [N, blocks * block_size]), 1, 0, K)
    else:
        require.size(ctx, K, g_idx=g_idx)
        flat, groups = reshape(ctx, codes, [N, blocks * block_size]), reshape(ctx, g_idx, [K])

        def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
            group, known = wrapped(maps.source(groups).at([c[1]]), maps.dim(blocks))
            return number(maps.source(flat).at(c), *(maps.source(p).at([c[0], group], known) for p in parameters))

        rows = gather_map(ctx, [N, K], a.dtype, element)
    result = affine(ctx, left, permute(ctx, rows, (1, 0)), bias)
    return ctx.view(result, (*a.shape[:-1], N))


_WORDS = {2: DType.UINT16, 4: DType.UINT32, 8: DType.UINT64}


def _words(b: Tensor, rows: int, columns: int, pitch: int, bits: int) -> Tensor | None:
    """Return b's packed codes as a GEMM operand, K x N; None unless b begins at the start of a weight's memory.

    The start of a weight is aligned to words, in which the GEMM loads the codes.
    """
    if b.buffer.kind is not BufferKind.WEIGHT or b.offset != 0 or not b.is_contiguous:
        return None
    return Tensor(_WORDS[bits], (rows, columns), b.buffer, strides=(1, pitch))


def _conversion(
    ctx: Lowering, number: Callable[..., Scalar], parameters: Sequence[Tensor], bits: int, block: int
) -> Conversion:
    """Return the GEMM prologue that dequantizes codes, with parameters [columns, blocks]."""
    code = Scalar(DType.INT32, "leaf")
    placed = [permute(ctx, ctx.materialize(x), (1, 0)) for x in parameters]
    leaves = [Scalar(x.dtype, "leaf") for x in placed]
    return Conversion(code, number(code, *leaves), tuple(zip(leaves, placed, strict=True)), bits, block)


def _zero_points(ctx: Lowering, zeros: Tensor, rows: int, blocks: int, bits: int) -> Tensor:
    """Return zero points [rows, blocks]. Zero points of uint8 are codes that are packed like the weights."""
    if zeros.dtype is not DType.UINT8:
        require.size(ctx, rows * blocks, zero_points=zeros)
        return reshape(ctx, zeros, [rows, blocks])
    width = -(-blocks * bits // 8)
    require.size(ctx, rows * width, zero_points=zeros)
    codes = elementwise(ctx, lambda x: s.cast(x, DType.UINT8), _unpacked(ctx, reshape(ctx, zeros, [rows, width]), bits))
    return part(ctx, reshape(ctx, codes, [rows, width * (8 // bits)]), 1, 0, blocks)


_INTEGER_CODES = frozenset({DType.INT4, DType.UINT4, DType.UINT8})
_FLOAT_CODES = FLOATS_8 | {DType.FLOAT4E2M1}


@contrib_op("GatherBlockQuantized", T1=_INTEGER_CODES | _FLOAT_CODES, T2=UP_TO_FLOAT32, Tind=INDICES)
def gather_block_quantized(
    ctx: Lowering,
    data: T1,
    indices: Tind,
    scales: T2,
    zero_points: T1 | None = None,
    *,
    bits: int = 4,
    block_size: int = 128,
    gather_axis: int = 0,
    quantize_axis: int = 1,
) -> Tensor:
    """Gather (data - zero_points) * scales. An index out of range yields 0."""
    floats = data.dtype in _FLOAT_CODES
    if (block_size < 16 or block_size & (block_size - 1)) and not (floats and block_size == 0):
        expected = "be a power of two of at least 16, or also 0 if data are floats"
        raise require.violation("block_size", expected, block_size)
    is_allowed, found = not floats or zero_points is None, f"data of {data.dtype.short} with zero points"
    require.that(is_allowed, "zero_points", "be left out if data are floats", found)
    require.least_rank(1, data=data)
    require.rank(data.rank, scales=scales)
    at, along = normalize_axis(gather_axis, data.rank), normalize_axis(quantize_axis, data.rank)
    default = 0
    if data.dtype is DType.UINT8:
        require.one_of(WIDTHS, bits=bits)
        expected = "be neither quantize_axis nor the last axis of uint8 data, whose bytes pack several codes"
        require.that(at not in (along, data.rank - 1), "gather_axis", expected, gather_axis)
        default = 1 << (bits - 1)
        data = _along_last(ctx, data, bits)
        zero_points = None if zero_points is None else _along_last(ctx, zero_points, bits)
    codes, zeros = data, zero_points
    for axis, (blocks, dim) in enumerate(zip(scales.shape, codes.shape, strict=True)):
        wanted = dim if axis != along else ceildiv(dim, block_size) if block_size else 1
        fits, expected = eq(blocks, wanted), f"have the size {wanted!r} in dimension {axis}"
        if floats and axis != along:
            fits, expected = logical_or(fits, eq(blocks, 1)), f"have the size {wanted!r} or 1 in dimension {axis}"
        require.holds(ctx, fits, "scales", expected, blocks)
    require.rank(codes.rank, zero_points=zeros)
    shape = [*codes.shape[:at], *indices.shape, *codes.shape[at + 1 :]]

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        table = maps.source(codes)
        index, inside = wrapped(maps.source(indices).at(c[at : at + indices.rank]), table.dim(at))
        coordinates = [*c[:at], index, *c[at + indices.rank :]]
        block = list(coordinates)
        block[along] = s.trunc_divide(coordinates[along], block_size) if block_size else s.constant(0, DType.INT64)
        if floats:
            by = maps.source(scales)
            for axis in range(codes.rank):
                block[axis] = s.minimum(block[axis], by.dim(axis) - 1)
            value = s.cast(table.at(coordinates, inside, 0.0), DType.FLOAT32) * s.widen(by.at(block, inside, 0.0))
            return s.cast(s.where(inside, value, 0.0), scales.dtype)
        code = s.cast(table.at(coordinates, inside), DType.INT32)
        offset = default if zeros is None else s.cast(maps.source(zeros).at(block, inside), DType.INT32)
        scale = s.widen(maps.source(scales).at(block, inside))
        return s.cast(s.where(inside, s.cast(code - offset, DType.FLOAT32) * scale, 0.0), scales.dtype)

    return gather_map(ctx, shape, scales.dtype, element)


def _along_last(ctx: Lowering, x: Tensor, bits: int) -> Tensor:
    """Unpack the codes in the bytes of x along the last dimension."""
    return reshape(ctx, _unpacked(ctx, x, bits), [*x.shape[:-1], x.shape[-1] * (8 // bits)])
