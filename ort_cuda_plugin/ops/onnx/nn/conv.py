"""Convolutions: Conv and ConvTranspose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack

from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import Dim, ceildiv, eq, product, sym_max
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.views import permute, reshape
from ....program.steps.steps import Convolve, Input
from ....program.steps.windows import Windows
from ... import requirements as require
from ...registry import FLOATS, NO_BFLOAT16, HostTensor, T, attributes_of, contrib_op, op
from .windows import Ints, WindowAttributes, count_windows, per_axis, windows


def _static_kernel(x: Tensor, w: Tensor, kernel_shape: Ints | None) -> tuple[int, ...]:
    """Check the ranks, and return the kernel shape of W."""
    require.least_rank(3, X=x)
    require.rank(x.rank, W=w)
    kernel = tuple(dim for dim in w.shape[2:] if isinstance(dim, int))
    if len(kernel) != w.rank - 2 or not all(isinstance(dim, int) for dim in w.shape):
        wanted = "a shape known when the session is created"
        raise require.unsupported("shape", "the shape of W", "known only when the model runs", wanted)
    require.one_of((kernel,), kernel_shape=kernel_shape and tuple(kernel_shape))
    return kernel


def _check_groups(group: int, channels: Dim, rows: Dim) -> None:
    if group < 1 or (isinstance(rows, int) and rows % group) or (isinstance(channels, int) and channels % group):
        wanted = f"be positive and divide {channels!r} input and {rows!r} output channels"
        raise require.violation("group", wanted, group)


@op("Conv", since=1, types={"T": FLOATS})
def conv(
    ctx: Lowering,
    x: T,
    w: T,
    b: T | None = None,
    *,
    group: int = 1,
    kernel_shape: Ints | None = None,
    **attributes: Unpack[WindowAttributes],
) -> Tensor:
    kernel = _static_kernel(x, w, kernel_shape)
    _check_groups(group, x.shape[1], w.shape[0])
    expected = f"have the size {x.shape[1]!r} / {group} (channels of X / group) in dimension 1"
    require.holds(ctx, eq(x.shape[1], w.shape[1] * group), "W", expected, w.shape[1])
    require.size(ctx, w.shape[0], B=b)
    window = windows(x.shape[2:], kernel, **attributes)
    spatial = count_windows(ctx, window)
    return _convolve(ctx, x, w, b, (x.shape[0], w.shape[0], *spatial), window, group)


def _convolve(
    ctx: Lowering,
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    shape: tuple[Dim, ...],
    window: Windows,
    groups: int,
    transposed: bool = False,
) -> Tensor:
    """Record a `Convolve` step with a bias per channel; return its result of ``shape``.

    Trailing spatial axes of size 1 are removed, because kernels vectorize along the last spatial axis. Some audio
    networks have such axes: they are written as 2-D with width 1.
    """
    last = len(window.size)
    while last > 1 and window.is_single(last - 1) and window.size[last - 2] != 1:
        last -= 1
    if last < len(window.size):
        x, w = reshape(ctx, x, x.shape[: 2 + last]), reshape(ctx, w, w.shape[: 2 + last])
        found = _convolve(ctx, x, w, b, shape[: 2 + last], window.of_axes(range(last)), groups, transposed)
        return reshape(ctx, found, shape)
    total = Scalar(s.accumulation_type(x.dtype) if x.dtype.is_float else x.dtype, "leaf")
    inputs: list[Input] = []
    value = total
    if b is not None:
        b = ctx.materialize(ctx.contiguous(b))
        leaf = Scalar(b.dtype, "leaf")
        inputs = [(leaf, ctx.view(b, (b.size, *[1] * (len(shape) - 2)), offset=b.offset))]
        value = total + s.cast(leaf, total.dtype)
    out = ctx.empty(shape, x.dtype)
    core = s.cast(value, x.dtype)
    operands = ctx.materialize(ctx.contiguous(x)), ctx.materialize(w)

    step = Convolve(
        ctx.nodes,
        shape,
        tuple(inputs),
        ((core, out),),
        operands=operands,
        total=total,
        windows=window,
        groups=groups,
        transposed=transposed,
    )
    ctx.record(step)
    return out


def transposed_convolution(
    ctx: Lowering, x: Tensor, w: Tensor, b: Tensor | None, pads: Sequence[Dim] | None, output_shape: Ints | None = None,
    *, auto_pad: str = "NOTSET", dilations: Ints | None = None, group: int = 1, kernel_shape: Ints | None = None,
    output_padding: Ints | None = None, strides: Ints | None = None,
) -> Tensor:  # fmt: skip
    """Compute ConvTranspose; ``pads`` may be non-negative sizes that only a Run knows."""
    kernel = _static_kernel(x, w, kernel_shape)
    rows = w.shape[1] * group
    _check_groups(group, w.shape[0], rows)
    require.dim(ctx, 0, x.shape[1], W=w)
    require.size(ctx, rows, B=b)
    rank = x.rank - 2
    explicit = pads if auto_pad == "NOTSET" and output_shape is None else None
    static = None if explicit is None else [pad for pad in explicit if isinstance(pad, int)]
    if explicit is None or static is None or len(static) == len(explicit):
        plain = windows(x.shape[2:], kernel, strides=strides, dilations=dilations, pads=static)
    else:
        require.count(2 * rank, pads=explicit)
        plain = windows(x.shape[2:], kernel, strides=strides, dilations=dilations)
        plain = replace(plain, begin=tuple(explicit[:rank]), end=tuple(explicit[rank:]))
    extra = per_axis("output_padding", output_padding, 0, rank, 0)
    axes = zip(plain.size, plain.strides, extra, plain.extent, strict=True)
    full = [(n - 1) * step + more + reach for n, step, more, reach in axes]
    begin = plain.begin
    spatial: list[Dim] = [n * step for n, step in zip(plain.size, plain.strides, strict=True)]
    if output_shape is not None:
        require.count((rank, x.rank), output_shape=output_shape)
        spatial = list(output_shape[-rank:])
    if output_shape is not None or auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        totals = [sym_max(reach - size, 0) for reach, size in zip(full, spatial, strict=True)]
        begin = tuple(total // 2 if auto_pad == "SAME_UPPER" else ceildiv(total, 2) for total in totals)
    elif auto_pad in ("NOTSET", "VALID"):
        spatial = [reach - left - right for reach, left, right in zip(full, plain.begin, plain.end, strict=True)]
    else:
        raise require.violation("auto_pad", "be one of 'NOTSET', 'SAME_UPPER', 'SAME_LOWER', 'VALID'", repr(auto_pad))
    for size in spatial:
        require.least_dim(ctx, 1, **{"each spatial dimension of the result": size})
    window = Windows(plain.size, plain.kernel, plain.strides, plain.dilations, begin, plain.end)
    disjoint = window.strides == kernel and all(gap == 1 for gap in window.dilations)
    whole = all(pad == 0 for pad in begin) and all(
        size == n * step for size, n, step in zip(spatial, window.size, window.strides, strict=True)
    )
    if disjoint and whole and group == 1 and (not ctx.device.emulated or "cudnn" in ctx.device.libraries):
        return _without_overlap(ctx, x, w, b, window)
    return _convolve(ctx, x, w, b, (x.shape[0], rows, *spatial), window, group, transposed=True)


@op("ConvTranspose", since=1, types={"T": FLOATS})
@attributes_of(transposed_convolution)
def conv_transpose(
    ctx: Lowering,
    x: T,
    w: T,
    b: T | None = None,
    *,
    output_shape: Ints | None = None,
    pads: Ints | None = None,
    **attributes: Any,
) -> Tensor:
    return transposed_convolution(ctx, x, w, b, pads, output_shape, **attributes)


@contrib_op("ConvTransposeWithDynamicPads", T=NO_BFLOAT16)
@attributes_of(transposed_convolution)
def conv_transpose_with_dynamic_pads(
    ctx: Lowering,
    x: T,
    w: T,
    pads: HostTensor | None = None,
    b: T | None = None,
    **attributes: Any,
) -> Tensor:
    """Compute ConvTranspose with pads from an input."""
    require.rank(1, pads=pads)
    values = None if pads is None else ctx.host_values(pads, "pads")
    for pad in values or ():
        require.least_dim(ctx, 0, pads=pad)
    return transposed_convolution(ctx, x, w, b, values, **attributes)


def _without_overlap(ctx: Lowering, x: Tensor, w: Tensor, b: Tensor | None, window: Windows) -> Tensor:
    """Lower a transposed convolution without overlap to a 1x1 convolution and a depth-to-space map.

    A 1x1 convolution runs on tensor cores; the gather kernel of ConvTranspose does not.
    """
    rank, rows, kernel = x.rank - 2, w.shape[1], window.strides
    taps = product(kernel)
    ones = [1] * rank
    turned = ctx.contiguous(permute(ctx, w, (*range(2, w.rank), 1, 0)))
    weights = reshape(ctx, turned, [taps * rows, w.shape[0], *ones])
    bias = None
    if b is not None:
        b = ctx.contiguous(b)
        bias = reshape(ctx, ctx.view(b, [taps, rows], [0, 1], b.offset), [taps * rows])
    points = Windows(window.size, tuple(ones), tuple(ones), tuple(ones), (0,) * rank, (0,) * rank)
    found = _convolve(ctx, x, weights, bias, (x.shape[0], taps * rows, *window.size), points, 1)
    parted = reshape(ctx, found, [x.shape[0], *kernel, rows, *window.size])
    interleaved = [axis for i in range(rank) for axis in (2 + rank + i, 1 + i)]
    spatial = [n * step for n, step in zip(window.size, kernel, strict=True)]
    return reshape(ctx, permute(ctx, parted, (0, 1 + rank, *interleaved)), [x.shape[0], rows, *spatial])
