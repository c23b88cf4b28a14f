"""Convolutions whose channels have several axes, as those have that a map afterwards spreads over places."""

from __future__ import annotations

from dataclasses import replace

from ..program.lowering import Lowering
from ..program.scalar import Scalar
from ..program.shapes import broadcast_strides
from ..program.steps import Convolve, Input, Map
from ..program.symbolic import hint, product
from ..program.tensor import Tensor, contiguous_strides

__all__ = ["join_channels", "unit_axis_last"]


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


def unit_axis_last(step: Map) -> Map:
    """A map whose tensors all have neighbours along an axis that is not the last, with its axes as memory has them."""
    if type(step) is not Map or not step.outputs or len(step.shape) < 3:
        return step
    placed = [broadcast_strides(x, step.shape) for _, x in (*step.outputs, *step.inputs)]
    units = [axis for axis, dim in enumerate(step.shape) if dim != 1 and all(each[axis] == 1 for each in placed)]
    if not units or units[-1] == len(step.shape) - 1:
        return step
    order = sorted(range(len(step.shape)), key=lambda axis: hint(placed[0][axis]), reverse=True)
    order = [*(axis for axis in order if axis != units[-1]), units[-1]]

    def moved(x: Tensor) -> Tensor:
        strides = broadcast_strides(x, step.shape)
        shape = [step.shape[axis] for axis in order]
        return Tensor(x.dtype, shape, x.buffer, strides=[strides[axis] for axis in order], offset=x.offset)

    return replace(
        step,
        shape=tuple(step.shape[axis] for axis in order),
        inputs=tuple((leaf, moved(x)) for leaf, x in step.inputs),
        outputs=tuple((value, moved(y)) for value, y in step.outputs),
    )
