"""Tables of the values of 4-bit floating-point codes: E2M1, FP4 and NF4."""

from __future__ import annotations

from typing import Final

import numpy as np

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
