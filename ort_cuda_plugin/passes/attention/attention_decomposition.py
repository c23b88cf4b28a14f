"""Attention decomposition: replaces an attention step by two GEMMs and a softmax if these take less time."""

from __future__ import annotations

from collections.abc import Sequence

from ...kernels.tactics import PARTS, parts_of, try_decomposition, with_tactic
from ...program.lowering.context import Lowering
from ...program.steps.steps import Attend
from ...program.steps.trace import Step


def decompose_attention(ctx: Lowering, steps: Sequence[Step]) -> list[Step]:
    """Replace an attention step by its two GEMMs and its row program if they take less time than one kernel.

    Assumes: an attention step has its ``parts``. A tuner, where there is one, has measured both.
    Guarantees: attention that stays carries its tactic. Attention that cuDNN or our tensor-core kernel computes
        stays whole.
    Example: ``attention(q, cache, ...)`` of one new token over many keys -> GEMM, Softmax, GEMM.
    """
    decomposed: list[Step] = []
    for step in steps:
        if not isinstance(step, Attend):
            decomposed.append(step)
            continue
        tuned = with_tactic(ctx, step)
        assert isinstance(tuned, Attend)
        is_in_parts = tuned.tactic.name == PARTS if tuned.tactic.name else try_decomposition(ctx, step)
        decomposed += parts_of(ctx, tuned) if is_in_parts else (tuned,)
    return decomposed
