"""Flattens the channel dimension of a convolution where earlier fusion has split it into several axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...program.expressions.scalar import Scalar
from ...program.expressions.symbolic import product
from ...program.lowering.context import Lowering
from ...program.lowering.shapes import broadcast_strides
from ...program.steps.steps import Convolve, Input, Map
from ...program.steps.tensor import contiguous_strides
from ...program.steps.trace import Step

__all__ = ["flatten_channel_axes"]


def flatten_channel_axes(ctx: Lowering, steps: Sequence[Step]) -> list[Step]:
    """Flatten the channel axes of a convolution into the one that cuDNN supports, and add a rearranging elementwise
    step (map).

    Assumes: the operands of the epilogue have one element per channel; a convolution with other operands, or with
        several results, stays.
    Guarantees: a flattened convolution writes one dense image, which the map rearranges.
    Example: ``conv -> [n, 8, 2, 2, h, w]`` (channels of three axes) -> ``conv -> [n, 32, h, w]; map``.
    """
    flat: list[Step] = []
    for step in steps:
        if isinstance(step, Convolve) and step.channel_axes > 1:
            ctx.nodes = step.nodes
            flat += _flattened(ctx, step)
        else:
            flat.append(step)
    return flat


def _flattened(ctx: Lowering, step: Convolve) -> list[Map]:
    """Return the convolution with one channel axis, and an elementwise step that rearranges its result.

    Returns the step alone if an operand of the epilogue does not have one element per channel, or for several results.
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
    if len(step.outputs) != 1:
        return [step]
    value, out = step.outputs[0]
    space = [step.shape[axis] for axis in step.space]
    image = ctx.empty([step.shape[0], product(channels), *space], out.dtype)
    leaf = Scalar(out.dtype, "leaf")
    whole = replace(step, shape=image.shape, inputs=tuple(inputs), outputs=((value, image),), channel_axes=1)
    return [whole, Map(step.nodes, step.shape, ((leaf, ctx.view(image, step.shape)),), ((leaf, out),))]
