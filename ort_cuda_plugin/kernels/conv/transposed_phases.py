"""Transposed convolution as plain convolutions, one per phase: the output pixels with the same remainder modulo stride.

Output pixel ``o`` accumulates ``x[i] * w[k]`` for ``o = i * stride + k * dilation - begin``. All pixels of a phase use
the same taps k, and their inputs i form an ordinary, possibly dilated window.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ...program.expressions.scalar import Scalar, constant
from ...program.expressions.symbolic import Dim, ceildiv
from ...program.lowering.context import Lowering, Tensor
from ...program.lowering.shapes import broadcast_strides
from ...program.lowering.views import permute
from ...program.steps.steps import Convolve, Map, Substitution, used_inputs
from ...program.steps.windows import Windows
from ..elementwise.index_map import IndexMap, gather_map

MAX_PHASES = 16
"""Maximum phases of a step; each becomes a launch of its own."""


@dataclass(frozen=True)
class Along:
    """The plain convolution of phase ``phase`` along one dimension.

    Tap t of its ``taps`` has the weight at kernel position ``last - t * apart``. For output pixel q of the phase it
    reads element ``q - pad + t * dilation`` of x.
    """

    phase: int
    taps: int
    last: int = 0
    apart: int = 1
    pad: int = 0
    dilation: int = 1


def along(phase: int, size: int, stride: int, dilation: int, begin: int) -> Along:
    own = [k for k in range(size) if (phase + begin - k * dilation) % stride == 0]
    if not own:
        return Along(phase, 0)
    common = math.gcd(stride, dilation)
    pad = -((phase + begin - own[-1] * dilation) // stride)
    return Along(phase, len(own), own[-1], stride // common, pad, dilation // common)


def has_few_phases(step: Convolve) -> bool:
    """Tell whether `phases` supports the step, and splits it into at most `MAX_PHASES` convolutions."""
    known = all(isinstance(pad, int) for pad in step.windows.begin)
    return known and step.channel_axes == 1 and math.prod(step.windows.strides) <= MAX_PHASES


def phases(ctx: Lowering, step: Convolve) -> Iterator[Map]:
    """Yield plain convolutions, one per phase of transposed convolution ``step``.

    A phase without taps becomes an elementwise step, whose accumulators are 0. The padding must be constant.
    """
    windows = step.windows
    kernel = step.operands[1].static_shape[2:]
    begin = [pad for pad in windows.begin if isinstance(pad, int)]
    axes = [
        [along(phase, size, stride, dilation, pad) for phase in range(stride)]
        for size, stride, dilation, pad in zip(kernel, windows.strides, windows.dilations, begin, strict=True)
    ]
    for chosen in itertools.product(*axes):
        dims = list(step.shape)
        for axis, one in zip(step.space, chosen, strict=True):
            dims[axis] = ceildiv(step.shape[axis] - one.phase, windows.strides[axis - step.space[0]])
        if 0 not in dims:
            yield _phase(ctx, step, chosen, dims)


def _phase(ctx: Lowering, step: Convolve, chosen: Sequence[Along], shape: Sequence[Dim]) -> Map:
    x, windows = step.operands[0], step.windows

    def part(y: Tensor) -> Tensor:
        """Return the view of y that has only the pixels of the phase."""
        strides, offset = list(broadcast_strides(y, step.shape)), y.offset
        dims = [size if stride != 0 else 1 for size, stride in zip(shape, strides, strict=True)]
        for axis, one, jump in zip(step.space, chosen, windows.strides, strict=True):
            offset += one.phase * strides[axis]
            strides[axis] *= jump
        return Tensor(y.dtype, dims, y.buffer, strides=strides, offset=offset)

    inputs = tuple((leaf, part(y)) for leaf, y in step.inputs)
    outputs = tuple((value, part(y)) for value, y in step.outputs)
    if any(one.taps == 0 for one in chosen):
        changed = Substitution({step.total: constant(0.0, step.total.dtype)})
        outputs = tuple((changed(value), y) for value, y in outputs)
        return Map(step.nodes, tuple(shape), used_inputs(inputs, [value for value, _ in outputs]), outputs)
    taps = tuple(one.taps for one in chosen)
    pads, gaps = tuple(one.pad for one in chosen), tuple(one.dilation for one in chosen)
    ends = tuple(
        size - 1 + (count - 1) * gap + 1 - have - pad
        for size, count, gap, have, pad in zip(
            (shape[axis] for axis in step.space), taps, gaps, windows.size, pads, strict=True
        )
    )
    plain = Windows(windows.size, taps, (1,) * len(taps), gaps, pads, ends)
    return replace(
        step,
        shape=tuple(shape),
        inputs=inputs,
        outputs=outputs,
        operands=(x, _weights(ctx, step, chosen)),
        windows=plain,
        transposed=False,
    )


def _weights(ctx: Lowering, step: Convolve, chosen: Sequence[Along]) -> Tensor:
    """Gather the weights of a phase: [output channels, channels, taps...] as in ONNX, channels-last in memory."""
    w, groups = step.operands[1], step.groups
    inputs, rows, *_ = w.static_shape
    channels = inputs // groups

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        group, row, *taps, channel = c
        positions = [one.last - tap * one.apart for one, tap in zip(chosen, taps, strict=True)]
        return maps.source(w).at([group * channels + channel, row, *positions])

    made = gather_map(ctx, (groups, rows, *(one.taps for one in chosen), channels), w.dtype, element)
    flat = ctx.view(made, (groups * rows, *made.shape[2:]), offset=made.offset)
    return permute(ctx, flat, (0, flat.rank - 1, *range(1, flat.rank - 1)))
