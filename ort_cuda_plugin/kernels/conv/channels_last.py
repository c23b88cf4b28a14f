"""Images whose channels come last in memory, so that cuDNN convolves them on tensor cores and moves nothing itself.

Convolutions that a library does, and all that lies between them, keep their images in that order. What another step
reads in the order of the model, such as an output of the cluster, is copied there once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from ...model.ir import DType
from ...program.expressions.symbolic import Dim
from ...program.lowering.context import Lowering, Tensor
from ...program.lowering.elementwise import rearranged
from ...program.lowering.shapes import broadcast_strides
from ...program.lowering.views import permute
from ...program.steps.steps import Convolve, Map
from ...program.steps.tensor import contiguous_strides
from ..contraction.integer_operands import MAX_DEPTH, integer_form
from ..elementwise.index_map import gather_map
from ..gemm.gemm_mma import kind_of, multiplies_integers
from ..gemm.tile_shapes import piece_of
from .depthwise_conv import is_depthwise
from .transposed_phases import has_few_phases

__all__ = [
    "channels_first",
    "channels_last_strides",
    "channels_last_weights",
    "empty_channels_last",
    "is_channels_last",
    "is_depthwise_beside_mma",
    "matrix_convolution_kind",
    "padded_channels",
    "permuted",
    "place_stride",
    "places_first",
    "prefers_channels_last",
    "suits_cudnn",
    "to_memory",
    "with_channels_last_result",
]

CHANNELS_APART = 4
"""A float32 image has a multiple of so many channels where it is copied: with 3 there are no tensor cores."""


def to_memory(rank: int) -> tuple[int, ...]:
    """The dimensions [images, channels, space...] in the order in which they lie in memory, channels last."""
    return (0, *range(2, rank), 1)


def places_first(step: Convolve) -> tuple[int, ...]:
    """The dimensions of the result with those of channels last."""
    return (0, *step.space, *step.channels)


def channels_last_strides(shape: Sequence[Dim], step: Dim | None = None) -> tuple[Dim, ...]:
    """The strides of [images, channels, space...] with channels last; ``step`` elements are from place to place."""
    step = shape[1] if step is None else step
    places = contiguous_strides((shape[0], *shape[2:], 1))
    return (places[0] * step, 1, *(stride * step for stride in places[1:-1]))


def place_stride(x: Tensor) -> Dim | None:
    """The elements from place to place of an image with channels last, whose places follow each other; else None."""
    spaces = [axis for axis in (*range(x.rank - 1, 1, -1), 0) if x.shape[axis] != 1]
    step = x.strides[spaces[0]] if spaces else x.shape[1]
    wanted = channels_last_strides(x.shape, step)
    fits = all(dim == 1 or have == want for dim, have, want in zip(x.shape, x.strides, wanted, strict=True))
    return step if fits else None


def is_channels_last(x: Tensor) -> bool:
    """Whether x is dense with its channels last."""
    return x.rank > 2 and place_stride(x) == x.shape[1]


AnyMap = TypeVar("AnyMap", bound=Map)


def permuted(step: AnyMap, axes: Sequence[int]) -> AnyMap:
    """The step over the same elements, its dimensions in another order; what it sums stays as it is."""
    rank = len(step.shape)

    def moved(x: Tensor) -> Tensor:
        if x.size == 1:
            return x
        dims = (*[1] * (rank - x.rank), *x.shape)
        strides = broadcast_strides(x, step.shape)
        shape = [dims[axis] for axis in axes]
        return Tensor(x.dtype, shape, x.buffer, strides=[strides[axis] for axis in axes], offset=x.offset)

    return replace(
        step,
        shape=tuple(step.shape[axis] for axis in axes),
        inputs=tuple((leaf, moved(x)) for leaf, x in step.inputs),
        outputs=tuple((value, moved(y)) for value, y in step.outputs),
    )


def empty_channels_last(ctx: Lowering, shape: Sequence[Dim], dtype: DType) -> Tensor:
    """A new image of [images, channels, space...] with its channels last."""
    return channels_first(ctx, ctx.empty([shape[axis] for axis in to_memory(len(shape))], dtype))


def channels_first(ctx: Lowering, memory: Tensor) -> Tensor:
    """A view as [images, channels, space...] of [images, space..., channels]."""
    return permute(ctx, memory, (0, memory.rank - 1, *range(1, memory.rank - 1)))


def with_channels_last_result(ctx: Lowering, step: Convolve) -> Convolve:
    """The step itself where its one result has channels last; else with another result that has them."""
    value, out = step.outputs[0]
    if place_stride(out) is not None:
        return step
    return replace(step, outputs=((value, empty_channels_last(ctx, out.shape, out.dtype)),))


def channels_last_weights(ctx: Lowering, w: Tensor, channels: Dim, groups: int) -> Tensor:
    """Weights with their channels last, of which an image that got channels of zeros has more."""
    axes = to_memory(w.rank)
    if isinstance(channels, int) and channels != w.shape[1] * groups:
        shape = [w.shape[0], *w.shape[2:], channels // groups]
        return gather_map(
            ctx,
            shape,
            w.dtype,
            lambda maps, c: maps.source(w).at([c[0], c[-1], *c[1:-1]], c[-1] < maps.dim(w.shape[1])),
        )
    return rearranged(ctx, permute(ctx, w, axes))


def prefers_channels_last(ctx: Lowering, step: Convolve) -> bool:
    """Whether cuDNN, or a kernel of ours, has tensor cores for a convolution only with channels last."""
    return suits_cudnn(ctx, step) or bool(matrix_convolution_kind(ctx, step)) or is_depthwise_beside_mma(ctx, step)


def matrix_convolution_kind(ctx: Lowering, step: Convolve) -> str:
    """What tensor cores multiply in our kernel for images with channels last, "" where it does not take the step."""
    x = step.operands[0]
    channels, kind = padded_channels(ctx, step) or x.shape[1], _kind(ctx, x.dtype)
    if step.is_converted:
        form = integer_form(step) if multiplies_integers(ctx.device) else None
        kind = form.kind if form is not None and _depth(step) <= MAX_DEPTH else ""
    if not kind or (step.transposed and not has_few_phases(step)):
        return ""
    return kind if isinstance(channels, int) and channels % (step.groups * piece_of(kind)) == 0 else ""


def _depth(step: Convolve) -> int:
    """Products of a sum."""
    return math.prod(step.operands[1].static_shape[1:])


def _kind(ctx: Lowering, dtype: DType) -> str:
    """What tensor cores multiply in our kernels of convolutions, "" for nothing."""
    return kind_of(ctx.device, ctx.options, dtype.short)


def is_depthwise_beside_mma(ctx: Lowering, step: Convolve) -> bool:
    """Whether a convolution is depthwise, of a type that our implicit GEMM takes."""
    return bool(_kind(ctx, step.operands[0].dtype)) and is_depthwise(ctx, step)


def suits_cudnn(ctx: Lowering, step: Convolve) -> bool:
    dtype, w = step.operands[0].dtype, step.windows.planar
    return (
        "cudnn" in ctx.device.libraries
        and (dtype in (DType.FLOAT16, DType.BFLOAT16) or (dtype is DType.FLOAT32 and ctx.options.use_tf32))
        and not step.transposed
        and step.channel_axes == 1
        and w.begin == w.end
    )


def padded_channels(ctx: Lowering, step: Convolve) -> int:
    """How many channels x gets, some of zeros; 0 where it stays. Zeros are read as others are, so few may be added.

    So many make a piece of 16 bytes in our kernel. cuDNN takes a float32 image with fewer.
    """
    x, w = step.operands
    channels = x.shape[1]
    if step.groups != 1 or step.transposed or not isinstance(channels, int) or w.shape[1] != channels:
        return 0
    if suits_cudnn(ctx, step):
        return CHANNELS_APART if x.dtype is DType.FLOAT32 and 1 < channels < CHANNELS_APART else 0
    kind = _kind(ctx, x.dtype)
    return piece_of(kind) if kind and channels < piece_of(kind) else 0
