"""Convolutions of each channel by itself, for images with channels last: neighbouring threads take neighbouring ones.

cuDNN has no tensor cores for these, and takes the engine that it has for all else. That ours is faster is an estimate.
"""

from __future__ import annotations

import functools
import itertools
import operator

from ..model.ir import DType
from ..program import scalar as s
from ..program.elementwise import copy_of
from ..program.lowering import Lowering, Tensor
from ..program.scalar import Scalar
from ..program.shapes import broadcast_strides
from ..program.steps import Convolve, Substitution
from ..program.symbolic import product
from ..program.views import permute
from .image_order import to_memory
from .index import IndexMap

__all__ = ["is_depthwise", "launch_depthwise"]

MAX_TAPS = 49
"""Elements of a window that the kernel has written out."""


def is_depthwise(step: Convolve) -> bool:
    """Whether each channel of the result is made of one channel, by a small window."""
    rows, channels, *kernel = step.operands[1].static_shape
    return (
        not step.transposed
        and step.groups == rows > 1 == channels
        and product(kernel) <= MAX_TAPS
        and len(step.outputs) == 1
    )


def launch_depthwise(ctx: Lowering, step: Convolve) -> None:
    """Launches our kernel for such a convolution and what follows it."""
    x, w = step.operands
    windows, (value, out) = step.windows, step.outputs[0]
    turned = permute(ctx, w, (*range(1, w.rank), 0))
    # Weights are turned once; see `library_calls`.
    weights = turned if turned.is_contiguous else copy_of(ctx, turned) if ctx.options.fusion else ctx.contiguous(turned)
    maps = IndexMap(ctx, step.shape, to_memory(len(step.shape)))
    image, channel, *place = maps.coordinates
    zero = s.constant(0, DType.INT64)
    total = s.constant(0, step.total.dtype)
    picture, taps = maps.source(x), maps.source(weights)
    # A size is a parameter of the kernel each time that it is asked for.
    begins, limits = maps.dims(windows.begin), maps.dims(windows.size)
    for tap in itertools.product(*(range(operator.index(size)) for size in windows.kernel)):
        at = [
            position * stride - begin + number * dilation
            for position, stride, begin, number, dilation in zip(
                place, windows.strides, begins, tap, windows.dilations, strict=True
            )
        ]
        inside = functools.reduce(operator.and_, [(i >= 0) & (i < limit) for i, limit in zip(at, limits, strict=True)])
        element = s.cast(picture.at([image, channel, *at], inside), total.dtype)
        number_of = [s.constant(number, DType.INT64) for number in tap]
        total = total + element * s.cast(taps.at([zero, *number_of, channel]), total.dtype)

    def loaded(y: Tensor) -> Scalar:
        if y.size == 1:
            return maps.number(y)
        strides = broadcast_strides(y, step.shape)
        whole = Tensor(y.dtype, step.shape, ctx.materialize(y).buffer, strides=strides, offset=y.offset)
        return maps.source(whole).at(maps.coordinates)

    found = Substitution({step.total: total, **{leaf: loaded(y) for leaf, y in step.inputs}})(value)
    maps.store(out, maps.coordinates, s.cast(found, out.dtype), None)
