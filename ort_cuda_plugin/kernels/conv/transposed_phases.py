"""A transposed convolution as plain ones: the places of the result that are a stride apart are one, of some weights.

Place ``o`` gets ``x[i] * w[k]`` where ``o = i * stride + k * dilation - begin``. Places with the same remainder by the
stride have the same elements k of the window, and their i are as far apart as in a window with a dilation.
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

__all__ = ["has_few_phases", "phases"]

MAX_PHASES = 16
"""Each is a launch."""


@dataclass(frozen=True)
class Along:
    """What one phase has along a dimension: elements of the window from ``last`` on, each ``apart`` before the other.

    They meet the places of x that begin ``pad`` before the place of the result, ``dilation`` apart.
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
    """Whether `phases` takes the step, and makes a few convolutions of it."""
    known = all(isinstance(pad, int) for pad in step.windows.begin)
    return known and step.channel_axes == 1 and math.prod(step.windows.strides) <= MAX_PHASES


def phases(ctx: Lowering, step: Convolve) -> Iterator[Map]:
    """The plain convolutions that ``step``, whose weights and paddings are known, is made of.

    A map is in the place of one that no element of the window reaches.
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
        """The places of the phase."""
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
    """The elements of the window that a phase has, as ONNX has weights, with their channels last in memory."""
    w, groups = step.operands[1], step.groups
    inputs, rows, *_ = w.static_shape
    channels = inputs // groups

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        group, row, *taps, channel = c
        places = [one.last - tap * one.apart for one, tap in zip(chosen, taps, strict=True)]
        return maps.source(w).at([group * channels + channel, row, *places])

    made = gather_map(ctx, (groups, rows, *(one.taps for one in chosen), channels), w.dtype, element)
    flat = ctx.view(made, (groups * rows, *made.shape[2:]), offset=made.offset)
    return permute(ctx, flat, (0, flat.rank - 1, *range(1, flat.rank - 1)))
