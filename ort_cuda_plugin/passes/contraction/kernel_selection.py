"""Kernel selection: a library call or one of the plugin's kernels for each contraction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...kernels.library.dense_batches import call_with_dense_batches
from ...kernels.library.library_attention import call_cudnn_attention
from ...kernels.library.library_calls import call_cublaslt, call_cudnn
from ...program.lowering.context import Lowering
from ...program.lowering.views import part
from ...program.steps.quarantine import kinds_for
from ...program.steps.schedule import Engine
from ...program.steps.steps import Attend, Contract, Convolve, Sums
from ...program.steps.trace import LibraryCall, Step
from ...schedule.choose import choose, library_epilogue, own_choice, scheduled
from ..emission.emission import launch_step


def select_kernels(ctx: Lowering, steps: Sequence[Step]) -> list[Step]:
    """Select the schedule of each contraction: a library call, or one of the plugin's kernels.

    A schedule that the step carries already has priority, then measured times, then rules.

    Assumes: layouts are final.
    Guarantees: a library call includes as much of the epilogue as the library supports, and an elementwise step
        computes the rest. A step that stays a contraction carries its schedule for emission. The guards of the choices
        become guards of the plan.
    Example: ``y = Exp(MatMul(a, b) + c)`` -> ``t = cublasLt(a, b, c); y = Exp(t)``.
    """
    selected: list[Step] = []
    for step in steps:
        selected += _selected(ctx, step) if isinstance(step, Sums) else [step]
    return selected


def _selected(ctx: Lowering, step: Sums) -> list[Step]:
    chosen = step if step.schedule is not None else scheduled(ctx, step, choose(ctx, step))
    assert chosen.schedule is not None
    if chosen.schedule.engine is Engine.LIBRARY:
        with ctx.recording(step.nodes) as made:
            is_called = _try_library_call(ctx, chosen)
        if is_called:
            kinds = kinds_for(chosen, chosen.schedule, library_epilogue(ctx, chosen))
            ctx.trace.schedules.update(dict.fromkeys(kinds))
            return made
        chosen = scheduled(ctx, step, own_choice(ctx, step))
    if isinstance(chosen, Convolve):
        return _launched(ctx, chosen) if _takes_channels_last(chosen) else _with_dense_image(ctx, chosen)
    return [chosen]


def _takes_channels_last(step: Convolve) -> bool:
    """Return whether the schedule's kernel reads a channels-last image but cannot convert operands while loading."""
    return step.schedule is not None and step.schedule.engine in (Engine.MMA, Engine.PHASES, Engine.DEPTHWISE)


def _launched(ctx: Lowering, step: Convolve) -> list[Step]:
    """Return the launches of a convolution. Some engines split it into several convolutions first."""
    with ctx.recording(step.nodes) as made:
        launch_step(ctx, step)
    return [x for one in made for x in (_launched(ctx, one) if isinstance(one, Convolve) else [one])]


def _with_dense_image(ctx: Lowering, step: Convolve) -> list[Step]:
    """Return the steps of the convolution over a contiguous copy of its image, for kernels that require NCHW."""
    x, w = step.operands
    if x.is_contiguous:
        return [step]
    with ctx.recording(step.nodes) as made:
        image = ctx.contiguous(part(ctx, x, 1, 0, step.groups * w.shape[1]))
    return [*made, replace(step, operands=(image, w))]


def _try_library_call(ctx: Lowering, step: Sums) -> bool:
    """Record a library call that computes the step; return False if no library supports the step."""
    match step:
        case Contract():
            is_called = call_cublaslt(ctx, step) or call_with_dense_batches(ctx, step)
        case Attend():
            is_called = 0 not in step.shape and call_cudnn_attention(ctx, step)
        case Convolve():
            is_called = 0 not in step.shape and call_cudnn(ctx, step)
        case _:
            return False
    for call in ctx.trace.steps if is_called else ():
        if isinstance(call, LibraryCall):
            call.note = f"{call.note} ({step.why})"
    return is_called
