"""Chooses what computes the sums of a product or convolution: a vendor library, or a kernel of ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..program.lowering import Lowering
from ..program.steps import Attend, Contract, Convolve
from ..program.symbolic import hint
from ..program.trace import Step
from .library_calls import call_cublaslt, call_cudnn

SMALL_ATTENTION = 1 << 14
"""Scores of a head up to which launches cost more than arithmetic. An estimate: no GPU has measured it."""


def choose(ctx: Lowering, steps: Sequence[Step]) -> list[Step]:
    """The steps with calls of the libraries that the device offers, where these can do the sums.

    Such a call takes as much of the step's epilogue as the library has; what is left is a map after it. Guards of the
    calls join the trace's.
    """
    recorded, nodes = ctx.trace.steps, ctx.nodes
    chosen: list[Step] = []
    for step in _without_large_attention(ctx, steps):
        ctx.trace.steps, ctx.nodes = [], step.nodes
        chosen += ctx.trace.steps if _is_called(ctx, step) else [step]
    ctx.trace.steps, ctx.nodes = recorded, nodes
    return chosen


def _without_large_attention(ctx: Lowering, steps: Sequence[Step]) -> Iterator[Step]:
    """The steps with the parts of attention where tensor cores win more than trips through memory cost."""
    for step in steps:
        if isinstance(step, Attend) and "cublaslt" in ctx.device.libraries:
            *_, rows, keys = step.score_shape
            if hint(rows) * hint(keys) > SMALL_ATTENTION:
                yield from step.parts
                continue
        yield step


def _is_called(ctx: Lowering, step: Step) -> bool:
    if isinstance(step, Contract):
        return not step.is_converted and call_cublaslt(ctx, step)
    return isinstance(step, Convolve) and 0 not in step.shape and call_cudnn(ctx, step)
