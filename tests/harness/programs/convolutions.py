"""Convolutions in NumPy: one matrix product for each tap of the kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from programs.values import Array


def convolution(
    x: Array, w: Array, groups: int, places: Sequence[int], kernel: Sequence[int], strides: Sequence[int],
    dilations: Sequence[int], begin: Sequence[int], end: Sequence[int],
) -> Array:  # fmt: skip
    """Return [images, rows, *places] for x [images, channels, *size] and w [rows, channels / groups, *kernel].

    ``rows`` are output channels, ``places`` the sizes of the output image.
    """
    images, rows, depth = x.shape[0], w.shape[0], w.shape[1]
    x = x[:, : groups * depth]
    # The last window may end before the image's end, and a negative pad cuts off a part of the image.
    needed = [(count - 1) * stride + (size - 1) * dilation + 1 for count, stride, size, dilation
              in zip(places, strides, kernel, dilations, strict=True)]  # fmt: skip
    widths = [(max(b, 0), max(n - size - b, 0)) for b, n, size in zip(begin, needed, x.shape[2:], strict=True)]
    x = np.pad(x, [(0, 0), (0, 0), *widths])
    x = x[(slice(None), slice(None), *(slice(max(-b, 0), None) for b in begin))]
    x = x.reshape(images, groups, depth, *x.shape[2:])
    w = w.reshape(groups, rows // groups, depth, *w.shape[2:])
    kind = np.float64 if x.dtype.kind == "f" else np.int64
    result = np.zeros((images, groups, rows // groups, math.prod(places)), kind)
    for place in np.ndindex(*kernel):
        window = [slice(k * d, k * d + (n - 1) * s + 1, s) for k, d, n, s
                  in zip(place, dilations, places, strides, strict=True)]  # fmt: skip
        part = x[(slice(None), slice(None), slice(None), *window)]
        flat = part.reshape(images, groups, depth, math.prod(places)).astype(kind)
        result += np.matmul(w[(slice(None), slice(None), slice(None), *place)].astype(kind), flat)
    return result.reshape(images, rows, *places)


def transposed_convolution(
    x: Array, w: Array, groups: int, places: Sequence[int], kernel: Sequence[int], strides: Sequence[int],
    dilations: Sequence[int], begin: Sequence[int], end: Sequence[int],
) -> Array:  # fmt: skip
    """Return [images, rows, *places] for x [images, channels, *size] and w [channels, rows / groups, *kernel]."""
    images, channels, sizes = x.shape[0], x.shape[1], x.shape[2:]
    depth, rows = channels // groups, w.shape[1]
    extent = [(n - 1) * s + (k - 1) * d + 1 for n, s, k, d in zip(sizes, strides, kernel, dilations, strict=True)]
    full = [max(e, b + p) for e, b, p in zip(extent, begin, places, strict=True)]
    kind = np.float64 if x.dtype.kind == "f" else np.int64
    result = np.zeros((images, groups, rows, *full), kind)
    flat = x.reshape(images, groups, depth, math.prod(sizes)).astype(kind)
    weights = w.reshape(groups, depth, rows, *w.shape[2:]).astype(kind)
    for place in np.ndindex(*kernel):
        window = [slice(k * d, k * d + (n - 1) * s + 1, s) for k, d, n, s
                  in zip(place, dilations, sizes, strides, strict=True)]  # fmt: skip
        matrix = weights[(slice(None), slice(None), slice(None), *place)].swapaxes(1, 2)
        product = np.matmul(matrix, flat).reshape(images, groups, rows, *sizes)
        result[(slice(None), slice(None), slice(None), *window)] += product
    cropped = [slice(b, b + p) for b, p in zip(begin, places, strict=True)]
    found: Array = result[(slice(None), slice(None), slice(None), *cropped)]
    return found.reshape(images, groups * rows, *places)
