"""Packing of elements of fewer than 8 bits: they are packed in ONNX Runtime's tensors, one byte each in the plugin's.

So views, offsets and index maps need no packing, and no two threads write the same byte. `model.packed` defines the
packed and the unpacked layout.
"""

from __future__ import annotations

import functools

from ...model.ir import DType
from ...model.packed import sign_bit
from ...program.expressions import scalar as s
from ...program.expressions.scalar import Scalar
from ...program.expressions.symbolic import Dim, ceildiv
from ...program.lowering.context import Lowering, Tensor
from .index_map import IndexMap, gather_map


def packed_bytes(size: Dim, dtype: DType) -> Dim:
    """Return the number of bytes that ``size`` packed elements take."""
    return ceildiv(size, 8 // dtype.bits)


def unpack(ctx: Lowering, x: Tensor) -> Tensor:
    """Unpack x to one byte per element. x's buffer must hold packed, contiguous elements from its start on."""
    dtype = x.dtype
    per_byte, mask, sign = 8 // dtype.bits, (1 << dtype.bits) - 1, sign_bit(dtype)
    packed = Tensor(DType.UINT8, (packed_bytes(x.size, dtype),), x.buffer)

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        byte = maps.source(packed).at([s.trunc_divide(c[0], per_byte)])
        code = (byte >> s.cast(s.trunc_modulo(c[0], per_byte) * dtype.bits, DType.UINT8)) & mask
        return (code ^ sign) - sign if sign else code

    codes = gather_map(ctx, (x.size,), DType.UINT8, element)
    return Tensor(dtype, x.shape, codes.buffer)


def pack(ctx: Lowering, x: Tensor) -> Tensor:
    """Pack x, which has one byte per element, into a one-dimensional uint8 tensor."""
    dtype = x.dtype
    per_byte, mask = 8 // dtype.bits, (1 << dtype.bits) - 1
    dense = ctx.contiguous(ctx.materialize(x))
    count = dense.size
    codes = Tensor(DType.UINT8, (count,), dense.buffer, strides=(1,), offset=dense.offset)

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        source = maps.source(codes)
        first = c[0] * per_byte
        codes_of_byte = [source.at([first])]
        codes_of_byte += [source.at([first + i], first + i < source.dim(0)) for i in range(1, per_byte)]
        parts = [(code & mask) << i * dtype.bits for i, code in enumerate(codes_of_byte)]
        return functools.reduce(lambda a, b: a | b, parts)

    return gather_map(ctx, (packed_bytes(count, dtype),), DType.UINT8, element)
