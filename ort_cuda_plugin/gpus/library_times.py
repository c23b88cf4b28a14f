"""Cost model of a library's GEMM: the fastest of several tiles and split-K factors, in whole waves of blocks.

Efficiencies are typical of well-tuned kernels; real libraries select by their own heuristics.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["CONVOLUTION", "SPLIT_K_SECONDS", "Rates", "library_time"]

TILES = {(256, 128): 1.0, (128, 256): 1.0, (128, 128): 0.92, (128, 64): 0.75, (64, 128): 0.75, (64, 64): 0.55}
"""Efficiency by tile (rows, columns): fraction of a multiprocessor's peak rate if all multiprocessors have tiles."""
SMALL_TILES = {(64, 32): 0.35, (32, 64): 0.35, (32, 32): 0.22}
"""Efficiency of smaller tiles, for GEMMs with few blocks."""
SPLITS = (1, 2, 3, 4, 6, 8, 16)
CONVOLUTION = 0.88
"""Fraction of a GEMM's rate that an implicit GEMM reaches: it gathers sliding windows."""
SPLIT_K_SECONDS = 1e-6
"""Time of the reduction of a split-K GEMM, seconds."""


@dataclass(frozen=True)
class Rates:
    """Rates of a GPU per unit of time; the caller chooses the unit.

    ``operations``: floating-point operations of one multiprocessor; ``l2_bytes``: bytes that the L2 delivers;
    ``parts``: duration of a split-K reduction; ``sharing``: multiprocessors that share an L2 load, as in a thread block
    cluster.
    """

    multiprocessors: int
    operations: float
    l2_bytes: float
    parts: float
    sharing: int


def library_time(m: int, n: int, k: int, batches: int, itemsize: int, rates: Rates) -> tuple[float, float]:
    """Return the time of the fastest tile for a batched ``m x n x k`` GEMM, and the bytes of its L2 traffic."""
    best = (math.inf, 0.0)
    for (rows, columns), share in (TILES | SMALL_TILES).items():
        tiles = -(-m // rows) * -(-n // columns) * batches
        for split in SPLITS:
            depth = -(-k // split)
            if split > 1 and (depth < 128 or tiles * split > 4 * rates.multiprocessors):
                continue
            waves = -(-tiles * split // rates.multiprocessors)
            taken = waves * 2.0 * rows * columns * (-(-depth // 32) * 32) / (rates.operations * share)
            l2 = tiles * (rows + columns) * k * itemsize / rates.sharing + (split > 1) * 8.0 * split * m * n * batches
            total = max(taken, l2 / rates.l2_bytes) + (split > 1) * rates.parts
            if total < best[0]:
                best = total, l2
    return best
