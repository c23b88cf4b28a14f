"""One convolution in place of several of one image, as the modules of Inception networks have them.

A small convolution takes about as long as a launch, and all of them read the same image. In one kernel their channels
are side by side. What it stores stays apart: each result has its own tensor, with its own distance from place to place.
So those that read the results, and those that are a part of a concatenation, find them as they were.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace

from ..program.lowering import Lowering
from ..program.steps import Convolve, Tactic
from ..program.trace import Step
from .contract import ProductTactic
from .image_order import matrix_convolution_kind, place_stride
from .matrix_conv import holds_for, launch_matrix_convolution, team_of_convolution
from .merged_sums import Merging, has_one_result, merge_sums
from .tactics import explain

__all__ = ["merge_convolutions"]


def merge_convolutions(ctx: Lowering, steps: Iterable[Step]) -> list[Step]:
    """The steps with one kernel in place of convolutions of one image that it computes in less time.

    They are what tensor cores multiply, and all of them are small together. Guards join the trace's.
    """
    return merge_sums(steps, _Convolutions(ctx))


class _Convolutions(Merging[Convolve]):
    columns, weight_columns = 1, 0

    def __init__(self, ctx: Lowering) -> None:
        self.ctx = ctx

    def candidate(self, step: Step) -> Convolve | None:
        if not isinstance(step, Convolve) or step.is_converted or step.tactic.name or 0 in step.shape:
            return None
        x, w = step.operands
        if step.transposed or not step.groups == step.channel_axes == 1 or not w.is_constant:
            return None
        is_ours = place_stride(x) is not None and matrix_convolution_kind(self.ctx, step)
        return step if is_ours and has_one_result(step) else None

    def key(self, step: Convolve) -> Hashable:
        (x, w), y = step.operands, step.outputs[0][1]
        return x.buffer, x.dtype, x.shape, x.strides, x.offset, w.dtype, w.shape[1:], step.windows, y.dtype

    def is_faster(self, merged: Convolve, count: int) -> bool:
        return team_of_convolution(self.ctx, merged, count) is not None

    def made(self, merged: Convolve, count: int) -> list[Step] | None:
        ctx, team = self.ctx, team_of_convolution(self.ctx, merged, count)
        if team is None or not holds_for(ctx, merged, team):
            return None
        tactic = ProductTactic(team.tile, 1, team.teams)
        why = f"{count} convolutions of one image in less time than calls of a library"
        recorded, nodes = ctx.trace.steps, ctx.nodes
        ctx.trace.steps, ctx.nodes = [], merged.nodes
        launch_matrix_convolution(ctx, merged, tactic)
        explain(ctx, replace(merged, tactic=Tactic(tactic.name, why)))
        made = ctx.trace.steps
        ctx.trace.steps, ctx.nodes = recorded, nodes
        return made
