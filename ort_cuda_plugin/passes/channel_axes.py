"""Convolutions whose channels have several axes, as those have that a map afterwards spreads over places."""

from __future__ import annotations

from dataclasses import replace

from ..program.lowering import Lowering
from ..program.scalar import Scalar
from ..program.shapes import broadcast_strides
from ..program.steps import Convolve, Input, Map
from ..program.symbolic import product
from ..program.tensor import contiguous_strides

__all__ = ["join_channels"]


def join_channels(ctx: Lowering, step: Convolve) -> list[Map]:
    """The convolution with one axis of channels, and a map that moves its result; a library has no other form of it.

    The step alone where something other than a number for each channel follows the sums.
    """
    inputs: list[Input] = []
    channels = [step.shape[axis] for axis in step.channels]
    for leaf, x in step.inputs:
        strides = broadcast_strides(x, step.shape)
        along = [strides[axis] for axis in step.channels]
        elsewhere = [stride for axis, stride in enumerate(strides) if axis not in step.channels]
        if any(stride != 0 for stride in elsewhere) or tuple(along) != contiguous_strides(channels):
            return [step]
        shape = (product(channels), *[1] * len(step.space))
        inputs.append((leaf, ctx.view(x, shape, (1, *[0] * len(step.space)), x.offset)))
    if step.channel_axes == 1 or len(step.outputs) != 1:
        return [step]
    value, out = step.outputs[0]
    space = [step.shape[axis] for axis in step.space]
    image = ctx.empty([step.shape[0], product(channels), *space], out.dtype)
    leaf = Scalar(out.dtype, "leaf")
    whole = replace(step, shape=image.shape, inputs=tuple(inputs), outputs=((value, image),), channel_axes=1)
    return [whole, Map(step.nodes, step.shape, ((leaf, ctx.view(image, step.shape)),), ((leaf, out),))]
