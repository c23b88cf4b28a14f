"""Replaces kernels that operators launch themselves by a fixed smooth function of all elements that the kernel reads.

The function depends on each element and its position, so a program that reads other elements, or in another order,
gives other results. It also depends on the launch's nodes and on the number of the result, but not on the kernel.
Results are between 1/4 and 5/4, so that their logarithms and roots exist; integer results are 0 to 3.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from ort_cuda_plugin.model.ir import DType, Node
from programs.values import Array


def identity(nodes: Sequence[Node], name: str = "") -> float:
    """Return a number from 0 to 1 that identifies a launch's origin."""
    text = "|".join([name, *(node.label for node in nodes)])
    return (zlib.crc32(text.encode()) & 0xFFFF) / 0x10000


def digest(arrays: Sequence[Array]) -> float:
    """Return the value of a smooth function of all elements of all arrays, in row-major order."""
    total = 0.0
    for number, array in enumerate(arrays):
        flat = np.sin(np.nan_to_num(array.astype(np.float64).reshape(-1), nan=0.5, posinf=2.5, neginf=-2.5))
        if flat.size:
            weights = 1.25 + np.sin(1.0 + number + 0.7 * np.arange(flat.size))
            total += (0.3 + 0.2 * number) * float(flat @ weights) / np.sqrt(flat.size)
    return total


def result(key: float, number: int, total: float, shape: tuple[int, ...], dtype: DType) -> Array:
    """Return the elements of output ``number`` of a launch, computed from the `digest` ``total`` of its inputs."""
    size = int(np.prod(shape, dtype=np.int64))
    phase = 6.0 * key + (1.0 + 0.5 * number) * total
    values: Array = 0.75 + 0.5 * np.sin(phase + 0.37 * np.arange(size)).reshape(shape)
    if dtype.is_float:
        return values
    if dtype is DType.BOOL:
        return np.greater(values, 0.75)
    return np.asarray(np.floor(4.0 * (values - 0.25)).clip(0, 3), dtype.numpy)
