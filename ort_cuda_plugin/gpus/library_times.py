"""Cost model of a library's GEMM: the time of its fastest tile shape, in whole waves of blocks.

The efficiencies are those of well-tuned kernels; real libraries select by their own heuristics. The model has no
split-K: with split-K its errors against published times (docs/estimates.md) were larger, for every assumed cost of the
reduction of partial sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["CONVOLUTION", "Rates", "attention_time", "library_time", "tile_exponent"]

TILES = {(256, 128): 1.0, (128, 256): 1.0, (128, 128): 0.92, (128, 64): 0.75, (64, 128): 0.75, (64, 64): 0.55}
"""Efficiency by tile (rows, columns): fraction of its peak rate that a multiprocessor reaches on such a tile."""
SMALL_TILES = {(64, 32): 0.35, (32, 64): 0.35, (32, 32): 0.22}
"""Efficiency of smaller tiles, which give small GEMMs enough blocks for all multiprocessors."""
CONVOLUTION = 0.88
"""Fraction of a GEMM's rate that an implicit GEMM reaches, which gathers the windows of a convolution."""

ATTENTION = 0.6
"""Fraction of a GEMM's rate that attention reaches: its second GEMM waits for the softmax."""
ATTENTION_ROWS = 128
"""Query rows per block of a library's attention kernel."""


@dataclass(frozen=True)
class Rates:
    """Rates of a GPU per unit of time; the caller chooses the unit.

    ``operations``: floating-point operations of one multiprocessor; ``l2_bytes``: bytes that the L2 delivers;
    ``sharing``: multiprocessors that one L2 load serves (multicast in a thread block cluster); ``exponent``: the power
    to which the tiles' efficiencies are raised, see `tile_exponent`.
    """

    multiprocessors: int
    operations: float
    l2_bytes: float
    sharing: int
    exponent: float = 1.0


def tile_exponent(kind: str) -> float:
    """Return the power to which efficiencies of tiles are raised for operand type ``kind``; fitted to published.json.

    Small TF32 tiles are less efficient than small 16-bit tiles: their elements take twice the shared-memory bytes.
    """
    return 1.2 if kind == "tf32" else 1.0


def library_time(m: int, n: int, k: int, batches: int, itemsize: int, rates: Rates) -> tuple[float, float]:
    """Return the time of a batched ``m x n x k`` GEMM with its fastest tile, and the bytes of its reads from the L2."""
    best = (math.inf, 0.0)
    for (rows, columns), share in (TILES | SMALL_TILES).items():
        tiles = -(-m // rows) * -(-n // columns) * batches
        waves = -(-tiles // rates.multiprocessors)
        taken = waves * 2.0 * rows * columns * (-(-k // 32) * 32) / (rates.operations * share**rates.exponent)
        l2 = tiles * (rows + columns) * k * itemsize / rates.sharing
        best = min(best, (max(taken, l2 / rates.l2_bytes), l2))
    return best


def attention_time(heads: int, rows: int, keys: int, width: int, multiprocessors: int, operations: float) -> float:
    """Return the time of attention, in whole waves of blocks of `ATTENTION_ROWS` queries.

    ``heads``: heads of all batches together; ``width``: elements of a key plus those of a value; ``operations``:
    floating-point operations of one multiprocessor per unit of time, which is also the unit of the result.
    """
    waves = -(-heads * -(-rows // ATTENTION_ROWS) // multiprocessors)
    padded = 2.0 * ATTENTION_ROWS * (-(-keys // 64) * 64) * width
    return waves * padded / (operations * ATTENTION)
