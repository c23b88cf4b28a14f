"""DeformConv: convolution with learned sampling offsets, as im2col and a matrix product."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ....kernels.elementwise.index_map import IndexMap, gather_map, unravel
from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import Dim, eq, floordiv, product
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import elementwise
from ....program.lowering.multiply import multiply
from ....program.lowering.views import reshape, unsqueeze
from ....program.steps.windows import Windows
from ... import requirements as require
from ...registry import FLOATS, T, op
from ..image.resize import clamped_integer
from .windows import count_windows, windows


def _patches(
    ctx: Lowering, x: Tensor, offset: Tensor, mask: Tensor | None, window: Windows, spatial: Sequence[Dim]
) -> Tensor:
    """Return the sampled elements of each window, [N, C, taps, output pixels].

    x is [N, C, in...], ``offset`` [N, offset groups, taps, axes, output pixels], ``mask`` the same without axes.
    Samples are interpolated linearly, with zeros outside of x.
    """
    rank = x.rank - 2
    real = s.accumulation_type(x.dtype)
    taps, positions = offset.shape[2], offset.shape[4]
    depth = floordiv(x.shape[1], offset.shape[1])

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        source, offsets = maps.source(x), maps.source(offset)
        batch, channel, tap, position = c
        group = s.trunc_divide(channel, maps.dim(depth))
        kernel, out = unravel(tap, maps.dims(window.kernel)), unravel(position, maps.dims(spatial))
        steps, gaps, begin = (maps.dims(values) for values in (window.strides, window.dilations, window.begin))
        firsts, fractions = [], []
        for axis in range(rank):
            regular = out[axis] * steps[axis] + kernel[axis] * gaps[axis] - begin[axis]
            shift = offsets.at([batch, group, tap, s.constant(axis, DType.INT64), position])
            sampled = s.cast(regular, real) + s.cast(shift, real)
            low = s.floor(sampled)
            firsts.append(clamped_integer(low, -2, source.dim(2 + axis)))
            fractions.append(sampled - low)
        total = s.constant(0, real)
        for corner in itertools.product((0, 1), repeat=rank):
            weight, inside, at = s.constant(1, real), s.constant(True, DType.BOOL), []
            for axis, upper in enumerate(corner):
                index = firsts[axis] + upper
                inside = inside & (index >= 0) & (index < source.dim(2 + axis))
                weight = weight * (fractions[axis] if upper else 1.0 - fractions[axis])
                at.append(index)
            value = s.cast(source.at([batch, channel, *at], inside), real)
            total = total + s.where(inside, weight * value, 0.0)
        if mask is not None:
            total = total * s.cast(maps.source(mask).at([batch, group, tap, position]), real)
        return s.cast(total, x.dtype)

    return gather_map(ctx, [*x.shape[:2], taps, positions], x.dtype, element)


@op("DeformConv", since=19, types={"T": FLOATS})
def deform_conv(
    ctx: Lowering,
    x: T,
    w: T,
    offset: T,
    b: T | None = None,
    mask: T | None = None,
    *,
    dilations: tuple[int, ...] | None = None,
    group: int = 1,
    kernel_shape: tuple[int, ...] | None = None,
    offset_group: int = 1,
    pads: tuple[int, ...] | None = None,
    strides: tuple[int, ...] | None = None,
) -> Tensor:
    """Gather the elements of each window (im2col), then multiply them by the weights."""
    require.least_rank(3, X=x)
    require.rank(x.rank, W=w, offset=offset, mask=mask)
    require.least(1, group=group, offset_group=offset_group)
    rank, (samples, channels) = x.rank - 2, x.shape[:2]
    kernel, rows, depth = w.shape[2:], floordiv(w.shape[0], group), w.shape[1]
    if kernel_shape is not None:
        require.that(len(kernel_shape) == rank, "kernel_shape", f"have {rank} entries", list(kernel_shape))
        for dim, wanted in zip(kernel, kernel_shape, strict=True):
            expected = f"be W's kernel shape {list(kernel)}"
            require.holds(ctx, eq(dim, wanted), "kernel_shape", expected, list(kernel_shape))
    window = windows(x.shape[2:], kernel, strides=strides, dilations=dilations, pads=pads)
    spatial = count_windows(ctx, window)
    positions, taps = product(spatial), product(kernel)
    expected = f"have the size {channels!r} / {group} (channels of X / group) in dimension 1"
    require.holds(ctx, eq(depth * group, channels), "W", expected, depth)
    require.multiple_of(ctx, w.shape[0], group, "the number of output channels of W", "group")
    require.multiple_of(ctx, channels, offset_group, "the number of channels of X", "offset_group")
    require.shape(ctx, (samples, offset_group * taps * rank, *spatial), offset=offset)
    offset = reshape(ctx, offset, [samples, offset_group, taps, rank, positions])
    if mask is not None:
        require.shape(ctx, (samples, offset_group * taps, *spatial), mask=mask)
        mask = reshape(ctx, mask, [samples, offset_group, taps, positions])
    patches = _patches(ctx, x, offset, mask, window, spatial)
    patches = reshape(ctx, patches, [samples, group, depth * taps, positions])
    weights = reshape(ctx, w, [group, rows, depth * taps])
    result = reshape(ctx, multiply(ctx, weights, patches), [samples, w.shape[0], *spatial])
    if b is None:
        return result
    require.shape(ctx, (w.shape[0],), bias=b)
    return elementwise(ctx, lambda y, bias: y + bias, result, unsqueeze(ctx, b, range(1, 1 + rank)))
