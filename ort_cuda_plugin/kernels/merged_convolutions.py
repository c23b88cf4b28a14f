"""One convolution in place of several of one image, as the modules of Inception networks have them.

A small convolution takes about as long as a launch, and all of them read the same image. In one kernel their channels
are side by side. What it stores stays apart: each result has its own tensor, with its own distance from place to place.
So those that read the results, and those that are a part of a concatenation, find them as they were.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from ..program.lowering import Lowering
from ..program.passes.alike import joined_constant, joined_inputs, same_leaves
from ..program.passes.place import are_apart, written_views
from ..program.passes.uses import Uses
from ..program.steps import Convolve, Tactic, joined_nodes
from ..program.trace import ReadBack, Step
from .image_order import matrix_convolution_kind, place_stride
from .matrix_conv import is_small_convolution, matrix_convolution_tactics

__all__ = ["merge_convolutions"]

CHANNELS = 1
"""The axis along which results lie side by side."""
WHY = "several convolutions of one image, done when a library begins"


def merge_convolutions(ctx: Lowering, steps: Iterable[Step]) -> list[Step]:
    """The steps with one convolution in place of those of one image that a kernel of ours computes together.

    They are what tensor cores multiply, and all of them are small together. Guards join the trace's.
    """
    result: list[Step | None] = list(steps)
    groups: dict[Hashable, list[int]] = {}
    for position, step in enumerate(result):
        if isinstance(step, Convolve) and _is_mergeable(ctx, step):
            groups.setdefault(_operand_key(step), []).append(position)
    uses = Uses((position, step) for position, step in enumerate(result) if step is not None)
    for positions in groups.values():
        left = positions
        while left:
            left = _merge_first(ctx, result, uses, left)
    return [step for step in result if step is not None]


def _is_mergeable(ctx: Lowering, step: Convolve) -> bool:
    """Whether the weights are known, tensor cores multiply them, and there is one result, in one place or several."""
    x, w = step.operands
    if step.transposed or step.is_converted or step.tactic.name or not step.groups == step.channel_axes == 1:
        return False
    result, stored = step.outputs[0][0], step.outputs[0][1].dtype
    if not all(value is result and y.dtype is stored and y.shape == step.shape for value, y in step.outputs):
        return False
    if not w.is_constant or 0 in step.shape:
        return False
    return place_stride(x) is not None and bool(matrix_convolution_kind(ctx, step))


def _operand_key(step: Convolve) -> Hashable:
    (x, w), y = step.operands, step.outputs[0][1]
    return x.buffer, x.dtype, x.shape, x.strides, x.offset, w.dtype, w.shape[1:], step.windows, y.dtype


def _merge_first(ctx: Lowering, steps: list[Step | None], uses: Uses[int], positions: Sequence[int]) -> list[int]:
    """Merges the first convolution with as many others as it may; gives the positions of those that are left."""
    start, *others = positions
    first = steps[start]
    assert isinstance(first, Convolve)
    merged, parts, left = first, [first], []
    for position in others:
        other = steps[position]
        assert isinstance(other, Convolve)
        if same_leaves(first, other, CHANNELS) is not None and _may_begin(steps, uses, other, start, position):
            joined = _joined(ctx, [*parts, other])
            if joined is not None:
                merged = joined
                parts.append(other)
                steps[position] = None
                continue
        left.append(position)
    steps[start] = merged
    return left


def _may_begin(steps: Sequence[Step | None], uses: Uses[int], step: Convolve, start: int, position: int) -> bool:
    """Whether a step may be where ``start`` is: what it reads is there, and nobody needs what was in its place."""
    if any(isinstance(between, ReadBack) for between in steps[start:position]):
        return False
    if any(start <= writer < position for writer in uses.writers(step.operands[0].buffer)):
        return False
    for _, target in step.outputs:
        if any(start <= reader < position for reader in uses.readers(target.buffer)):
            return False
        for writer in uses.writers(target.buffer):
            between = steps[writer]
            if start <= writer < position and between is not None:
                written = written_views(between, target.buffer)
                if not written or not all(are_apart(y, target) for y in written):
                    return False
    return True


def _joined(ctx: Lowering, steps: Sequence[Convolve]) -> Convolve | None:
    """The convolution whose channels are those of all steps; None where it is not small."""
    first, *others = steps
    parts: list[range] = []
    for step in steps:
        begin = parts[-1].stop if parts else 0
        parts.append(range(begin, begin + operator.index(step.shape[CHANNELS])))
    shape = (*first.shape[:CHANNELS], parts[-1].stop, *first.shape[CHANNELS + 1 :])
    merged = replace(
        first,
        nodes=joined_nodes(*steps),
        shape=shape,
        operands=(first.operands[0], joined_constant([step.operands[1] for step in steps], axis=0)),
        inputs=joined_inputs(first, others, CHANNELS, shape),
        outputs=tuple((first.outputs[0][0], y) for step in steps for _, y in step.outputs),
        parts=tuple(part for step, part in zip(steps, parts, strict=True) for _ in step.outputs),
    )
    if not is_small_convolution(ctx, merged):
        return None
    return replace(merged, tactic=Tactic(next(iter(matrix_convolution_tactics(ctx, merged))), WHY))
