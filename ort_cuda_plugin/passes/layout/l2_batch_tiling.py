"""Batch tiling for L2 reuse: runs a convolution and the depthwise convolution after it for one batch tile at a time.

The largest activations of an inverted bottleneck are those between its expanding 1x1 convolution and its depthwise
convolution. For a whole batch they go to device memory and back; for a batch tile they stay in the L2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...kernels.conv.channels_last import empty_channels_last, is_channels_last, prefers_channels_last
from ...kernels.conv.depthwise_conv import is_depthwise
from ...program.expressions.symbolic import Dim, hint, le
from ...program.lowering.context import Lowering, Tensor
from ...program.lowering.elementwise import rearranged
from ...program.lowering.views import part, permute
from ...program.steps.steps import Convolve
from ...program.steps.tensor import BufferKind
from ...program.steps.trace import Step
from ..analysis.uses import Uses

L2_BYTES = {(8, 0): 40 << 20, (8, 9): 48 << 20, (9, 0): 50 << 20, (10, 0): 126 << 20, (12, 0): 64 << 20}
"""L2 bytes assumed per compute capability: of A100, L4, H100, B200 and RTX 5080. Other GPUs get no batch tiles."""
FULL, PART = 0.75, 0.6
"""Fractions of the L2 size. Up to FULL, for input plus result of the first convolution, tiling is not needed. PART is
the maximum for a batch tile, which also counts the result of the depthwise convolution.
"""
MOST_PARTS = 4
"""Maximum number of batch tiles. With more, the additional launches take as long as the saved memory traffic."""


def tile_batches_for_l2(ctx: Lowering, steps: Sequence[Step]) -> list[Step]:
    """Tile the batch of a convolution and the depthwise convolution after it, so that the tensor between stays in L2.

    Assumes: images have their channels last; the tensor between has one writer and one reader.
    Guarantees: the tiles cover the batch in order, and each has its own tensor between both convolutions.
    Example: ``e = Conv1x1(x [64, ...]); y = Depthwise(e)`` -> for 16 images at a time: ``e = Conv1x1(x[i:i+16]);
        y[i:i+16] = Depthwise(e)``.
    """
    size = L2_BYTES.get(ctx.device.compute_capability, 0)
    if not size:
        return list(steps)
    uses = Uses(enumerate(steps))
    tiled: list[Step] = []
    number = 0
    while number < len(steps):
        pair = steps[number : number + 2]
        count = _parts(ctx, uses, number, pair, size)
        if count > 1:
            first, second = _convolutions(pair)
            tiled += _in_parts(ctx, first, second, count)
            number += 2
        else:
            tiled.append(steps[number])
            number += 1
    return tiled


def _parts(ctx: Lowering, uses: Uses[int], number: int, pair: Sequence[Step], size: int) -> int:
    """Return the number of batch tiles for two adjacent steps.

    Returns 1 if they are not a channels-last convolution and a depthwise convolution of its result, which nothing else
    may read or write. Returns 1 also if tiling gains nothing, or if `MOST_PARTS` tiles would still be too large.
    """
    both = _convolutions(pair)
    if len(both) < 2 or any(step.transposed or step.is_converted for step in both):
        return 1
    first, second = both
    if len(first.outputs) != 1 or not prefers_channels_last(ctx, first) or not is_depthwise(ctx, second):
        return 1
    between, images = first.outputs[0][1], first.shape[0]
    buffer = between.buffer
    is_between = (
        buffer.kind is BufferKind.SCRATCH
        and list(uses.writers(buffer)) == [number]
        and list(uses.readers(buffer)) == [number + 1]
        and second.operands[0].strides == between.strides
        and is_channels_last(between)
        and is_channels_last(second.operands[0])
        and second.reads_once(buffer)
    )
    if not is_between or not all(_has_images(step, x, images) for step in (first, second) for x in _others(step)):
        return 1
    moved = [first.operands[0].nbytes, between.nbytes]
    if sum(map(hint, moved)) <= FULL * size:
        return 1
    moved.append(second.outputs[0][1].nbytes)
    count = next((count for count in range(2, MOST_PARTS + 1) if sum(map(hint, moved)) <= PART * size * count), 1)
    return count if count <= hint(images) and ctx.guard(le(count, images)) else 1


def _convolutions(steps: Sequence[Step]) -> list[Convolve]:
    return [step for step in steps if isinstance(step, Convolve)]


def _others(step: Convolve) -> list[Tensor]:
    return [step.operands[0], *(x for _, x in (*step.inputs, *step.outputs))]


def _has_images(step: Convolve, x: Tensor, images: Dim) -> bool:
    """Return whether x has the batch of ``images`` as its first dimension, or is the same for each image."""
    return x.rank < len(step.shape) or x.shape[0] in (1, images)


def _in_parts(ctx: Lowering, first: Convolve, second: Convolve, count: int) -> Iterator[Step]:
    weights = second.operands[1]
    if ctx.options.fusion:  # the weights are rearranged once, by constant folding, for all tiles
        last = weights.rank - 1
        with ctx.recording(second.nodes) as made:
            turned = rearranged(ctx, permute(ctx, weights, (*range(1, weights.rank), 0)))
        weights = permute(ctx, turned, (last, *range(last)))
        yield from made
    images = first.shape[0]
    for number in range(count):
        start = images * number // count
        size = images * (number + 1) // count - start
        of_first = _part(ctx, first, start, size)
        between = empty_channels_last(ctx, of_first.shape, first.outputs[0][1].dtype)
        yield replace(of_first, outputs=((first.outputs[0][0], between),))
        yield replace(_part(ctx, second, start, size), operands=(between, weights))


def _part(ctx: Lowering, step: Convolve, start: Dim, size: Dim) -> Convolve:
    """Return the step restricted to ``size`` images from index ``start`` on."""

    def images(x: Tensor) -> Tensor:
        return x if x.rank < len(step.shape) or x.shape[0] == 1 else part(ctx, x, 0, start, size)

    return replace(
        step,
        shape=(size, *step.shape[1:]),
        operands=(images(step.operands[0]), *step.operands[1:]),
        inputs=tuple((leaf, images(x)) for leaf, x in step.inputs),
        outputs=tuple((value, images(x)) for value, x in step.outputs),
    )
