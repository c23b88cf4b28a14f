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
from ..program.symbolic import Dim, ceildiv, le, product
from ..program.trace import ReadBack, Step
from .contract import ProductTactic
from .image_order import matrix_convolution_kind, place_stride
from .library_form import holds
from .matrix_conv import launch_matrix_convolution
from .matrix_product import TEAMS, team_blocks, team_tile
from .tactics import explain
from .tiles import Tile

__all__ = ["merge_convolutions"]

CHANNELS = 1
"""The axis along which results lie side by side."""


def merge_convolutions(ctx: Lowering, steps: Iterable[Step]) -> list[Step]:
    """The steps with one kernel in place of convolutions of one image that it computes in less time.

    They are what tensor cores multiply, and all of them are small together. Guards join the trace's.
    """
    return _Merger(ctx, list(steps)).run()


class _Merger:
    def __init__(self, ctx: Lowering, steps: list[Step]) -> None:
        self.ctx = ctx
        self.steps: list[Step | None] = [*steps]
        self.uses = Uses(enumerate(steps))
        self.made: dict[int, list[Step]] = {}
        """What comes in place of the first of convolutions that are merged."""

    def run(self) -> list[Step]:
        groups: dict[Hashable, list[int]] = {}
        for position, step in enumerate(self.steps):
            if isinstance(step, Convolve) and _is_mergeable(self.ctx, step):
                groups.setdefault(_operand_key(step), []).append(position)
        for positions in groups.values():
            left = positions
            while len(left) > 1:
                left = self._merge_first(left)
        result: list[Step] = []
        for position, step in enumerate(self.steps):
            result += self.made.get(position, [] if step is None else [step])
        return result

    def _merge_first(self, positions: Sequence[int]) -> list[int]:
        """Merges the first convolution with as many others as it may; gives the positions of those that are left."""
        start, *others = positions
        parts = [self._convolution(start)]
        taken = [start]
        for position in others:
            other = self._convolution(position)
            if same_leaves(parts[0], other, CHANNELS) is None or not self._may_begin(other, start, position):
                continue
            if _tile(self.ctx, [*parts, other]) is not None:
                parts.append(other)
                taken.append(position)
        launched = _launched(self.ctx, parts) if len(parts) > 1 else None
        if launched is not None:
            self.made[start] = launched
            for position in taken:
                self.steps[position] = None
        return [position for position in others if position not in taken]

    def _convolution(self, position: int) -> Convolve:
        step = self.steps[position]
        assert isinstance(step, Convolve)
        return step

    def _may_begin(self, step: Convolve, start: int, position: int) -> bool:
        """Whether a step may be where ``start`` is: what it reads is there, and nobody needs what was in its place."""

        def between(users: Sequence[int]) -> list[int]:
            return [user for user in users if start <= user < position]

        if any(isinstance(other, ReadBack) for other in self.steps[start:position]):
            return False
        if any(between(self.uses.writers(buffer)) for buffer in step.reads):
            return False
        for _, target in step.outputs:
            if between(self.uses.readers(target.buffer)):
                return False
            for writer in between(self.uses.writers(target.buffer)):
                written = written_views(self.steps[writer], target.buffer)
                if self.steps[writer] is not None and not (written and all(are_apart(y, target) for y in written)):
                    return False
        return True


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


def _channels(steps: Sequence[Convolve]) -> list[range]:
    """Those of each step where all lie side by side."""
    parts: list[range] = []
    for step in steps:
        begin = parts[-1].stop if parts else 0
        parts.append(range(begin, begin + operator.index(step.shape[CHANNELS])))
    return parts


def _sizes(steps: Sequence[Convolve]) -> tuple[Dim, int, Dim]:
    """Places of all images, channels of all steps, and elements of a patch."""
    x, w = steps[0].operands
    places = steps[0].shape[0] * product(steps[0].places)
    return places, _channels(steps)[-1].stop, x.shape[1] * product(w.shape[2:])


def _tile(ctx: Lowering, steps: Sequence[Convolve]) -> Tile | None:
    """The tile for teams of warps that compute all steps, where these take less than their calls of a library.

    What a rule allows in place of one call may be that much deeper for several.
    """
    places, channels, depth = _sizes(steps)
    kind = matrix_convolution_kind(ctx, steps[0])
    return team_tile(ctx.device, kind, places, channels, 1, ceildiv(depth, len(steps)))


def _launched(ctx: Lowering, steps: Sequence[Convolve]) -> list[Step] | None:
    """The launch of one convolution whose channels are those of all steps; None where only a Run tells its size."""
    tile = _tile(ctx, steps)
    assert tile is not None
    places, channels, _ = _sizes(steps)
    if not holds(ctx, le(team_blocks(tile, places, channels, 1), ctx.device.multiprocessors)):
        return None
    tactic = ProductTactic(tile, 1, TEAMS)
    first, *others = steps
    shape = (*first.shape[:CHANNELS], channels, *first.shape[CHANNELS + 1 :])
    merged = replace(
        first,
        nodes=joined_nodes(*steps),
        shape=shape,
        operands=(first.operands[0], joined_constant([step.operands[1] for step in steps], axis=0)),
        inputs=joined_inputs(first, others, CHANNELS, shape),
        outputs=tuple((first.outputs[0][0], y) for step in steps for _, y in step.outputs),
        parts=tuple(part for step, part in zip(steps, _channels(steps), strict=True) for _ in step.outputs),
        tactic=Tactic(tactic.name, f"{len(steps)} convolutions of one image in less time than calls of a library"),
    )
    recorded, nodes = ctx.trace.steps, ctx.nodes
    ctx.trace.steps, ctx.nodes = [], merged.nodes
    launch_matrix_convolution(ctx, merged, tactic)
    explain(ctx, merged)
    made = ctx.trace.steps
    ctx.trace.steps, ctx.nodes = recorded, nodes
    return made
