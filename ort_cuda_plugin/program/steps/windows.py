"""Sliding windows over spatial dimensions, for convolutions and pooling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..expressions.symbolic import Dim


@dataclass(frozen=True)
class Windows:
    """Sliding windows of shape ``kernel`` over spatial dimensions ``size``; each field has one entry per dimension.

    ``begin`` and ``end`` are the padding before and after each dimension.
    """

    size: tuple[Dim, ...]
    kernel: tuple[Dim, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: tuple[Dim, ...]
    end: tuple[Dim, ...]

    @property
    def extent(self) -> tuple[Dim, ...]:
        """Return the extent of a window along each dimension, in elements, with dilation."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True))

    @property
    def pointwise(self) -> bool:
        """Return whether windows are single elements, without stride or padding, as in a pointwise convolution."""
        ones, pads = (*self.kernel, *self.strides), (*self.begin, *self.end)
        return all(size == 1 for size in ones) and all(pad == 0 for pad in pads)

    def is_single(self, axis: int) -> bool:
        """Return whether the dimension ``axis`` has size 1, windows of size 1, and no padding."""
        ones = self.size[axis], self.kernel[axis]
        return all(size == 1 for size in ones) and self.begin[axis] == 0 and self.end[axis] == 0

    def of_axes(self, axes: Sequence[int]) -> Windows:
        """Return the windows restricted to ``axes``."""
        sizes = tuple(self.size[i] for i in axes), tuple(self.kernel[i] for i in axes)
        steps = tuple(self.strides[i] for i in axes), tuple(self.dilations[i] for i in axes)
        return Windows(*sizes, *steps, tuple(self.begin[i] for i in axes), tuple(self.end[i] for i in axes))

    @property
    def planar(self) -> Windows:
        """Return the windows with two or more dimensions, as kernels need: 1-D windows get a leading one of size 1."""
        if len(self.size) > 1:
            return self
        sizes = (1, *self.size), (1, *self.kernel), (1, *self.strides), (1, *self.dilations)
        return Windows(*sizes, (0, *self.begin), (0, *self.end))
