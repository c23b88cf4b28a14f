"""Codes of few bits as operators of com.microsoft take them."""

from __future__ import annotations

import numpy as np

from contributed import Array


def packed(codes: Array, bits: int) -> Array:
    """Codes along the last dimension in bytes, the lowest bits first; a byte that is not full has zeros."""
    per_byte = 8 // bits
    missing = -codes.shape[-1] % per_byte
    full = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, missing)])
    parts = full.reshape(*codes.shape[:-1], -1, per_byte) << np.arange(0, 8, bits)
    result: Array = parts.sum(-1).astype(np.uint8)
    return result
