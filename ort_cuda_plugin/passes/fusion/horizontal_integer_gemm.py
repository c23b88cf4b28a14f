"""Horizontal fusion of integer GEMMs with one quantized left operand, such as Q, K and V projections."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace

from ...program.lowering.context import Lowering
from ...program.steps.schedule import Choice
from ...program.steps.steps import Contract
from ...program.steps.trace import Step
from ...schedule.choose import has_integer_operands, scheduled
from ...schedule.gemm import own_gemm_choices
from .horizontal_contraction import Merging, has_one_result, merge_contractions

__all__ = ["merge_integer_gemms"]


def merge_integer_gemms(ctx: Lowering, steps: Iterable[Step]) -> list[Step]:
    """Merge integer GEMMs of one left operand with constant weights into one launch that writes each result to its
    own tensor.

    Assumes: DequantizeLinear is folded into the operands, which is not done for results without elements.
    Guarantees: readers of the results do not change. The merged GEMM has no split-K. The kernel's guards become guards
        of the plan.
    Example: ``q = MatMul(codes, wq); k = MatMul(codes, wk)`` -> ``q, k = MatMul(codes, [wq wk])``, two tensors.
    """
    return merge_contractions(steps, _Products(ctx))


class _Products(Merging[Contract]):
    columns, weight_columns = -1, 1

    def __init__(self, ctx: Lowering) -> None:
        self.ctx = ctx

    def candidate(self, step: Step) -> Contract | None:
        if not isinstance(step, Contract) or not all(step.conversions) or step.schedule is not None:
            return None
        if step.b.rank != 2 or not step.b.is_constant or step.column_axes != 1 or not has_one_result(step):
            return None
        return step if has_integer_operands(self.ctx, step) else None

    def key(self, step: Contract) -> Hashable:
        a, b = step.a, step.b
        return a.buffer, a.dtype, a.shape, a.strides, a.offset, b.dtype, b.shape[0], step.outputs[0][1].dtype

    def is_faster(self, merged: Contract, count: int) -> bool:
        """Return whether the chosen kernel has a tile and no split-K.

        The reduction kernel of split-K could write only one tensor, not several results.
        """
        choice = self._choice(merged, count)
        return choice is not None and choice.schedule.tile is not None and choice.schedule.split_k == 1

    def made(self, merged: Contract, count: int) -> list[Step]:
        choice = self._choice(merged, count)
        assert choice is not None
        return [scheduled(self.ctx, merged, choice)]

    def _choice(self, merged: Contract, count: int) -> Choice | None:
        """Return the schedule that rules choose for the merged GEMM, without sliced-K.

        The merged GEMM has enough tiles to occupy all multiprocessors, so it does not need sliced-K. Returns None if
        all such schedules are quarantined.
        """
        own = own_gemm_choices(self.ctx, merged)
        choice = next((choice for choice in own if choice.schedule.sliced_k == 1), None)
        return choice and replace(choice, why=f"replaces {count} GEMMs of the same codes")
