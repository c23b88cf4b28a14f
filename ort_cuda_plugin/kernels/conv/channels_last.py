"""Channels-last (NHWC) layout of the images that convolutions read and write.

In this layout cuDNN's and the plugin's tensor-core convolutions need no transpositions of their own. All steps between
such convolutions have the same layout. A tensor that another step reads in the model's layout, such as an output of the
cluster, is transposed once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ...model.ir import HALVES, DType
from ...program.expressions.symbolic import Dim
from ...program.lowering.context import Lowering, Tensor
from ...program.lowering.elementwise import rearranged
from ...program.lowering.views import permute
from ...program.steps.steps import Convolve
from ...program.steps.tensor import contiguous_strides
from ..contraction.integer_operands import MAX_DEPTH, integer_form
from ..elementwise.index_map import gather_map
from ..gemm.gemm_mma import kind_of, multiplies_integers
from ..gemm.tile_shapes import piece_of
from .depthwise_conv import is_depthwise
from .transposed_phases import has_few_phases

CHANNELS_APART = 4
"""Channels to which a float32 image is padded when it is copied: cuDNN has no tensor-core engine for 3 channels."""


def to_memory(rank: int) -> tuple[int, ...]:
    """Return the permutation from [images, channels, space...] to channels-last memory order."""
    return (0, *range(2, rank), 1)


def places_first(step: Convolve) -> tuple[int, ...]:
    """Return the permutation of the step's dimensions that moves the channels last."""
    return (0, *step.space, *step.channels)


def channels_last_strides(shape: Sequence[Dim], step: Dim | None = None) -> tuple[Dim, ...]:
    """Return channels-last strides of ``shape`` [images, channels, space...], in elements.

    ``step`` is the stride between adjacent pixels, by default the number of channels.
    """
    step = shape[1] if step is None else step
    pixels = contiguous_strides((shape[0], *shape[2:], 1))
    return (pixels[0] * step, 1, *(stride * step for stride in pixels[1:-1]))


def place_stride(x: Tensor) -> Dim | None:
    """Return the stride between adjacent pixels of a channels-last image, in elements; None for other tensors.

    Pixels may be apart, as in a slice of the channels, but all by the same stride.
    """
    spaces = [axis for axis in (*range(x.rank - 1, 1, -1), 0) if x.shape[axis] != 1]
    step = x.strides[spaces[0]] if spaces else x.shape[1]
    wanted = channels_last_strides(x.shape, step)
    fits = all(dim == 1 or have == want for dim, have, want in zip(x.shape, x.strides, wanted, strict=True))
    return step if fits else None


def is_channels_last(x: Tensor) -> bool:
    """Tell whether x is a contiguous channels-last image."""
    return x.rank > 2 and place_stride(x) == x.shape[1]


def empty_channels_last(ctx: Lowering, shape: Sequence[Dim], dtype: DType) -> Tensor:
    """Allocate a channels-last image of ``shape`` [images, channels, space...]."""
    return channels_first(ctx, ctx.empty([shape[axis] for axis in to_memory(len(shape))], dtype))


def channels_first(ctx: Lowering, memory: Tensor) -> Tensor:
    """View [images, space..., channels] as [images, channels, space...]."""
    return permute(ctx, memory, (0, memory.rank - 1, *range(1, memory.rank - 1)))


def with_channels_last_result(ctx: Lowering, step: Convolve) -> Convolve:
    """Return the step with a new, channels-last result tensor, or the step itself if its result is channels-last."""
    value, out = step.outputs[0]
    if place_stride(out) is not None:
        return step
    return replace(step, outputs=((value, empty_channels_last(ctx, out.shape, out.dtype)),))


def channels_last_weights(ctx: Lowering, w: Tensor, channels: Dim, groups: int) -> Tensor:
    """Return the weights in channels-last order, zero-padded to the image's ``channels`` if these are padded."""
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
    """Tell whether the step should read and write channels-last images: cuDNN or a kernel of the plugin needs them."""
    return suits_cudnn(ctx, step) or bool(matrix_convolution_kind(ctx, step)) or is_depthwise_beside_mma(ctx, step)


def matrix_convolution_kind(ctx: Lowering, step: Convolve) -> str:
    """Return the mma operand type with which the plugin's implicit GEMM can run the step, "" if it cannot."""
    x = step.operands[0]
    channels, kind = padded_channels(ctx, step) or x.shape[1], _kind(ctx, x.dtype)
    if step.is_converted:
        form = integer_form(step) if multiplies_integers(ctx.device) else None
        kind = form.kind if form is not None and _depth(step) <= MAX_DEPTH else ""
    if not kind or (step.transposed and not has_few_phases(step)):
        return ""
    return kind if isinstance(channels, int) and channels % (step.groups * piece_of(kind)) == 0 else ""


def _depth(step: Convolve) -> int:
    """Return k of the implicit GEMM: the number of multiply-adds per accumulator."""
    return math.prod(step.operands[1].static_shape[1:])


def _kind(ctx: Lowering, dtype: DType) -> str:
    """Return the operand type of the plugin's tensor-core convolutions for ``dtype``, "" if there is none."""
    return kind_of(ctx.device, ctx.options, dtype.short)


def is_depthwise_beside_mma(ctx: Lowering, step: Convolve) -> bool:
    """Tell whether a convolution is depthwise, of an element type that the plugin's implicit GEMM supports."""
    return bool(_kind(ctx, step.operands[0].dtype)) and is_depthwise(ctx, step)


def suits_cudnn(ctx: Lowering, step: Convolve) -> bool:
    dtype, w = step.operands[0].dtype, step.windows.planar
    return (
        "cudnn" in ctx.device.libraries
        and (dtype in HALVES or (dtype is DType.FLOAT32 and ctx.options.use_tf32))
        and not step.transposed
        and step.channel_axes == 1
        and w.begin == w.end
    )


def padded_channels(ctx: Lowering, step: Convolve) -> int:
    """Return the number of channels to which the step's image is zero-padded, 0 for no padding.

    The plugin's kernel needs a whole 16-byte chunk of channels; cuDNN needs `CHANNELS_APART` channels of a float32
    image. Images with more channels are not padded, since padding costs bandwidth. Images of grouped or transposed
    convolutions are not padded either.
    """
    x, w = step.operands
    channels = x.shape[1]
    if step.groups != 1 or step.transposed or not isinstance(channels, int) or w.shape[1] != channels:
        return 0
    if suits_cudnn(ctx, step):
        return CHANNELS_APART if x.dtype is DType.FLOAT32 and 1 < channels < CHANNELS_APART else 0
    kind = _kind(ctx, x.dtype)
    return piece_of(kind) if kind and channels < piece_of(kind) else 0
