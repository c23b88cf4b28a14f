"""Packs codes of 2 or 4 bits into bytes, in the order of com.microsoft's operators."""

from __future__ import annotations

import numpy as np

from contributed import Array


def packed(codes: Array, bits: int) -> Array:
    """Pack codes along the last dimension into bytes, the first code in the lowest bits; pad the last byte with 0."""
    per_byte = 8 // bits
    missing = -codes.shape[-1] % per_byte
    full = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, missing)])
    parts = full.reshape(*codes.shape[:-1], -1, per_byte) << np.arange(0, 8, bits)
    result: Array = parts.sum(-1).astype(np.uint8)
    return result
