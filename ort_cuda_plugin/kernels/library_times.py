"""How long the arithmetic of a library's kernels takes: the best of some tiles and splits of k, in whole waves.

The shares are those that good kernels reach; libraries choose by measurements of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["CONVOLUTION", "Rates", "library_time"]

TILES = {(256, 128): 1.0, (128, 256): 1.0, (128, 128): 0.92, (128, 64): 0.75, (64, 128): 0.75, (64, 64): 0.55}
"""Share of the rate that a tile reaches on a multiprocessor which has enough of them."""
SMALL_TILES = {(64, 32): 0.35, (32, 64): 0.35, (32, 32): 0.22}
SPLITS = (1, 2, 3, 4, 6, 8, 16)
CONVOLUTION = 0.88
"""Of a product's rate: patches are gathered."""


@dataclass(frozen=True)
class Rates:
    """Of a GPU, in any unit of time: operations of a multiprocessor, bytes of the L2, and what adding up parts takes.

    So many multiprocessors are ``sharing`` what they read.
    """

    multiprocessors: int
    operations: float
    l2_bytes: float
    parts: float
    sharing: int


def library_time(m: int, n: int, k: int, batches: int, itemsize: int, rates: Rates) -> tuple[float, float]:
    """What the best tile takes for the product, and the bytes that tiles read."""
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
