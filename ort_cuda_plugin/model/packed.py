"""Unpacking of elements of fewer than 8 bits in host memory.

Packed bytes have elements in row-major order, the first in the lowest bits; bits after the last element are 0. Unpacked
elements have a byte each: integers are sign-extended, floats zero-extended.
"""

from __future__ import annotations

import numpy as np

from .ir import Array, DType


def sign_bit(dtype: DType) -> int:
    """Return the mask of the sign bit that unpacking extends; 0 for unsigned integers and floats."""
    return 1 << (dtype.bits - 1) if dtype.is_integer and dtype.numpy.kind == "i" else 0


def unpack_array(packed: Array, dtype: DType, shape: tuple[int, ...]) -> Array:
    """Return the elements of ``packed``, one-dimensional uint8, as ``dtype.numpy`` with ``shape``."""
    size = int(np.prod(shape, dtype=np.int64))
    shifts = np.arange(0, 8, dtype.bits, dtype=np.uint8)
    codes = (packed[:, None] >> shifts & ((1 << dtype.bits) - 1)).reshape(-1)[:size]
    sign = np.uint8(sign_bit(dtype))
    return ((codes ^ sign) - sign).view(dtype.numpy).reshape(shape)
