"""Cost model of a library's GEMM: the fastest of several tiles, in whole waves of blocks.

Efficiencies are typical of well-tuned kernels; real libraries select by their own heuristics. No tile splits k: with
split-K factors, at any cost of their reduction, the model misses published times by more (docs/estimates.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["CONVOLUTION", "Rates", "attention_time", "library_time", "tile_exponent"]

TILES = {(256, 128): 1.0, (128, 256): 1.0, (128, 128): 0.92, (128, 64): 0.75, (64, 128): 0.75, (64, 64): 0.55}
"""Efficiency by tile (rows, columns): fraction of a multiprocessor's peak rate if all multiprocessors have tiles."""
SMALL_TILES = {(64, 32): 0.35, (32, 64): 0.35, (32, 32): 0.22}
"""Efficiency of smaller tiles, for GEMMs with few blocks."""
CONVOLUTION = 0.88
"""Fraction of a GEMM's rate that an implicit GEMM reaches: it gathers sliding windows."""

ATTENTION = 0.6
"""Efficiency of attention relative to a GEMM, as a factor: the softmax delays the second GEMM."""
ATTENTION_ROWS = 128
"""Queries of a block of attention."""


@dataclass(frozen=True)
class Rates:
    """Rates of a GPU per unit of time; the caller chooses the unit.

    ``operations``: floating-point operations of one multiprocessor; ``l2_bytes``: bytes that the L2 delivers;
    ``sharing``: multiprocessors that share an L2 load, as in a thread block cluster; ``exponent``: power of the tiles'
    efficiencies, see `tile_exponent`.
    """

    multiprocessors: int
    operations: float
    l2_bytes: float
    sharing: int
    exponent: float = 1.0


def tile_exponent(kind: str) -> float:
    """Return the power of a tile's efficiency for operands of a type: small tiles of TF32 have a lower efficiency than
    those of 16-bit types, since a staged byte holds half of the elements. Fitted to published.json.
    """
    return 1.2 if kind == "tf32" else 1.0


def library_time(m: int, n: int, k: int, batches: int, itemsize: int, rates: Rates) -> tuple[float, float]:
    """Return the time of the fastest tile for a batched ``m x n x k`` GEMM, and the bytes of its L2 traffic."""
    best = (math.inf, 0.0)
    for (rows, columns), share in (TILES | SMALL_TILES).items():
        tiles = -(-m // rows) * -(-n // columns) * batches
        waves = -(-tiles // rates.multiprocessors)
        taken = waves * 2.0 * rows * columns * (-(-k // 32) * 32) / (rates.operations * share**rates.exponent)
        l2 = tiles * (rows + columns) * k * itemsize / rates.sharing
        best = min(best, (max(taken, l2 / rates.l2_bytes), l2))
    return best


def attention_time(heads: int, rows: int, keys: int, width: int, multiprocessors: int, operations: float) -> float:
    """Return the time of attention for ``heads`` heads of all batches, in whole waves of blocks of `ATTENTION_ROWS`
    queries. ``width``: elements of a key and a value; ``operations``: those of a multiprocessor per unit of time.
    """
    waves = -(-heads * -(-rows // ATTENTION_ROWS) // multiprocessors)
    padded = 2.0 * ATTENTION_ROWS * (-(-keys // 64) * 64) * width
    return waves * padded / (operations * ATTENTION)
