"""Attention decomposition: replaces an attention step by two GEMMs and a softmax if the three take less time."""

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

    Assumes: an attention step keeps its unfused steps as ``parts``. With a tuner, measured times decide; without one,
        rules.
    Guarantees: attention that stays one step carries its schedule. Attention that cuDNN or the plugin's tensor-core
        kernel computes stays one step.
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
