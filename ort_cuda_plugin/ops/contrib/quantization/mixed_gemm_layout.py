"""Unpacks weights from CUTLASS's layout for GEMMs of 16-bit activations with weights of 2, 4 or 8 bits.

CUDAExecutionProvider's ``QMoE`` reads integer weights in this layout, and onnxruntime-genai's builder writes it. It
permutes the codes of a matrix [outputs, inputs]; with J = 16 / bits::

    inputs   8j + 2i + p within 8J  ->  2J*i + 2j + p: the elements of a thread's mma fragment are contiguous
    outputs  J adjacent ones are interleaved in runs of 64 inputs
    words    of 32 bits: codes with even indices first, then codes with odd indices

CUDAExecutionProvider uses this layout, made for compute capability 8.0, on later GPUs too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ....kernels.elementwise.index_map import IndexMap, gather_map
from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import Dim, eq, floordiv
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.views import reshape
from ... import requirements as require

TILE: Final = 64  # inputs in a contiguous run of one output, elements
PACKED_COLUMNS: Final = 8  # the codes of all outputs for one input fill a multiple of this, bytes
ACTIVATION_BITS: Final = 16


def try_interleaved(ctx: Lowering, activations: DType, sizes: Iterable[tuple[int, Dim, Dim]]) -> bool:
    """Return whether matrices of (bits, outputs, inputs) can have this layout, which has no padding."""
    if activations.itemsize * 8 != ACTIVATION_BITS:
        return False
    return all(
        _settle_multiple(ctx, inputs, TILE) and _settle_multiple(ctx, outputs, PACKED_COLUMNS * (8 // bits))
        for bits, outputs, inputs in sizes
    )


def _settle_multiple(ctx: Lowering, size: Dim, divisor: int) -> bool:
    return bool(ctx.settled(eq(floordiv(size, divisor) * divisor, size)))


def raw_codes(ctx: Lowering, codes: Tensor, rows: Dim, width: Dim, bits: int) -> Tensor:
    """Return the codes in plain order: uint8 [rows, width * bits / 8], lowest bits first."""
    turns, pack = ACTIVATION_BITS // bits, 8 // bits
    for size, name, divisor in ((width, "inputs", TILE), (rows, "outputs", PACKED_COLUMNS * pack)):
        require.multiple_of(ctx, size, divisor, f"the number of {name} of weights in CUTLASS's layout")
    packed = floordiv(width, pack)
    source = reshape(ctx, codes, [1, rows * packed])

    def byte(maps: IndexMap, c: list[Scalar]) -> Scalar:
        row, found = c[0], maps.source(source)
        result = s.constant(0, DType.INT32)
        for number in range(pack):
            k = c[1] * pack + number
            inside = k & 8 * turns - 1
            fragment = (inside & 7) >> 1
            k = k - inside + 2 * turns * fragment + (inside >> 3) * 2 + (inside & 1)
            tile = (row >> turns.bit_length() - 1) * maps.dim(floordiv(width, TILE)) + (k >> TILE.bit_length() - 1)
            at = (tile * turns + (row & turns - 1)) * TILE + (k & TILE - 1)
            word = 32 // bits
            inside = at & word - 1
            at = at - inside + (inside & 1) * (word // 2) + (inside >> 1)
            result = result | maps.code(found, s.constant(0, DType.INT64), at, bits) << number * bits
        return s.cast(result, DType.UINT8)

    return gather_map(ctx, [rows, packed], DType.UINT8, byte)
