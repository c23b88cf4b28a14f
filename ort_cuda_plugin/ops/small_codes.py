"""What codes of few bits stand for."""

from __future__ import annotations

from typing import Final

import numpy as np

E2M1: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The float of 4 bits, by its code. A kernel looks it up: an expression would be computed for each of the elements that
a thread has."""
