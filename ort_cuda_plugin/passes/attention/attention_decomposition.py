"""Attention decomposition: replaces an attention step by two GEMMs and a softmax if these take less time."""

from __future__ import annotations

from collections.abc import Sequence

from ...program.lowering.context import Lowering
from ...program.steps.schedule import Engine
from ...program.steps.steps import Attend
from ...program.steps.trace import Step
from ...schedule.attention import decomposed_attention
from ...schedule.choose import choose, scheduled


def decompose_attention(ctx: Lowering, steps: Sequence[Step]) -> list[Step]:
    """Replace an attention step by its two GEMMs and its row program if they take less time than one kernel.

    Assumes: an attention step has its ``parts``. A tuner, where there is one, has measured both.
    Guarantees: attention that stays carries its schedule. Attention that cuDNN or our tensor-core kernel computes
        stays whole.
    Example: ``attention(q, cache, ...)`` of one new token over many keys -> GEMM, Softmax, GEMM.
    """
    decomposed: list[Step] = []
    for step in steps:
        if not isinstance(step, Attend):
            decomposed.append(step)
            continue
        chosen = step if step.schedule is not None else scheduled(ctx, step, choose(ctx, step))
        assert chosen.schedule is not None
        decomposed += decomposed_attention(ctx, chosen) if chosen.schedule.engine is Engine.DECOMPOSED else (chosen,)
    return decomposed
