"""Merges small convolutions of one image into one kernel, as in the modules of Inception networks.

A small convolution takes about as long as a launch, and all of them read the same image. One kernel computes all their
channels. Each result keeps its own tensor, with its own pixel stride, so that readers and slices of concatenations do
not change.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace

from ...kernels.conv.channels_last import matrix_convolution_kind, place_stride
from ...kernels.conv.implicit_gemm_mma import (
    holds_for_convolution,
    launch_matrix_convolution,
    matrix_convolution_tactics,
    team_of_convolution,
)
from ...kernels.gemm.dispatch import ProductTactic
from ...kernels.gemm.tile_shapes import Team
from ...kernels.tactics import explain, try_integer_operands
from ...program.lowering.context import Lowering
from ...program.steps.steps import Convolve, Tactic
from ...program.steps.trace import Step
from .horizontal_contraction import Merging, has_one_result, merge_contractions

__all__ = ["merge_convolutions"]


def merge_convolutions(ctx: Lowering, steps: Iterable[Step]) -> list[Step]:
    """Merge convolutions of one image that differ in their weights only into one kernel, which writes each result
    to its own tensor.

    Assumes: images have their channels last; results have one writer.
    Guarantees: readers of the results do not change. The merged kernel takes less time than separate kernels, or no
    library computes them. Guards of the kernel join those of the plan.
    Example: ``a = Conv1x1(x, wa); b = Conv1x1(x, wb)`` -> ``a, b = launch(x, [wa wb])``.
    """
    return merge_contractions(steps, _Convolutions(ctx))


class _Convolutions(Merging[Convolve]):
    columns, weight_columns = 1, 0

    def __init__(self, ctx: Lowering) -> None:
        self.ctx = ctx

    def candidate(self, step: Step) -> Convolve | None:
        if not isinstance(step, Convolve) or step.tactic.name or 0 in step.shape:
            return None
        if step.is_converted and not (all(step.conversions) and try_integer_operands(self.ctx, step)):
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
        return self._team(merged, count) is not None or self._tiles(merged) is not None

    def _team(self, merged: Convolve, count: int) -> Team | None:
        """Return the sliced-K schedule that takes less time than so many library calls; None if there is none."""
        return None if merged.is_converted else team_of_convolution(self.ctx, merged, count)

    def _tiles(self, merged: Convolve) -> ProductTactic | None:
        """Return the schedule of our kernel if no library can compute the accumulators; None if it splits k, since the
        reduction kernel of split-K writes a single result. cuDNN would need one result tensor, and would copy strided
        images before reading them.
        """
        way = next(iter(matrix_convolution_tactics(self.ctx, merged).values()))
        is_ours = merged.is_converted or "cudnn" not in self.ctx.device.libraries
        return way if is_ours and way.splits == 1 else None

    def made(self, merged: Convolve, count: int) -> list[Step] | None:
        ctx, team = self.ctx, self._team(merged, count)
        if team is not None and not holds_for_convolution(ctx, merged, team):
            return None
        tactic = self._tiles(merged) if team is None else ProductTactic(team.tile, 1, team.teams)
        assert tactic is not None
        why = f"{count} convolutions of one image in less time than one by one"
        with ctx.recording(merged.nodes) as made:
            launch_matrix_convolution(ctx, merged, tactic)
            explain(ctx, replace(merged, tactic=Tactic(tactic.name, why)))
        return made
