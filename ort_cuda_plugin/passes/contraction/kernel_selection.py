"""Kernel selection: a library call or one of our kernels for each contraction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from ...kernels.conv.channels_last import with_channels_last_result
from ...kernels.conv.depthwise_conv import launch_depthwise
from ...kernels.conv.implicit_gemm_mma import launch_matrix_convolution, matrix_convolution_tactics
from ...kernels.library.dense_batches import call_with_dense_batches
from ...kernels.library.library_attention import call_cudnn_attention
from ...kernels.library.library_calls import call_cublaslt, call_cudnn
from ...kernels.tactics import LIBRARY, by_rules, explain, try_depthwise_in_memory_order, with_tactic
from ...program.lowering.context import Lowering
from ...program.lowering.elementwise import copy_into
from ...program.lowering.views import part
from ...program.steps.steps import Attend, Contract, Convolve, Sums, Tactic
from ...program.steps.trace import LibraryCall, Step

AnyStep = TypeVar("AnyStep", bound=Step)


def select_kernels(ctx: Lowering, steps: Sequence[Step]) -> list[Step]:
    """Select the engine of each contraction: a library's call, or one of our kernels with its tactic.

    Measured times have priority over rules, and so has a tactic that the step carries already.

    Assumes: layouts are final.
    Guarantees: a library call includes as much of the epilogue as the library supports, and a map computes the rest. A
        step that stays a contraction carries its tactic for emission. Guards of the calls join those of the plan.
    Example: ``y = Exp(MatMul(a, b) + c)`` -> ``t = cublasLt(a, b, c); y = Exp(t)``.
    """
    selected: list[Step] = []
    for step in steps:
        with ctx.recording(step.nodes) as made:
            tuned = with_tactic(ctx, step)
            is_called = _try_library_call(ctx, tuned)
        if not is_called:
            with ctx.recording(step.nodes) as made:
                made.append(_readable(ctx, _without_library(tuned)))
        selected += made
    return selected


def _without_library(step: AnyStep) -> AnyStep:
    """Return the step for our kernels, after no library accepted it."""
    return replace(step, tactic=Tactic()) if isinstance(step, Sums) and step.tactic.name == LIBRARY else step


def _readable(ctx: Lowering, step: Step) -> Step:
    """Return the step with the operands that our kernels support: a dense image for a convolution that no library
    computes.
    """
    if not isinstance(step, Convolve) or step.operands[0].is_contiguous:
        return step
    x, w = step.operands
    image = part(ctx, x, 1, 0, step.groups * w.shape[1])
    return replace(step, operands=(ctx.contiguous(image), w))


def _try_library_call(ctx: Lowering, step: Step) -> bool:
    """Record the library call, or the depthwise kernel, that computes the step; return whether there is one."""
    if not isinstance(step, Sums):
        return False
    if step.tactic.name in ("", LIBRARY):
        if try_depthwise_in_memory_order(ctx, step):
            assert isinstance(step, Convolve)
            placed = with_channels_last_result(ctx, step)
            launch_depthwise(ctx, placed)
            if placed is not step:
                copy_into(ctx, step.outputs[0][1], placed.outputs[0][1])
            return True
        if _call(ctx, step):
            for call in ctx.trace.steps:
                if isinstance(call, LibraryCall):
                    call.note = f"{call.note} ({step.tactic.why or by_rules(ctx)})"
            return True
    return isinstance(step, Convolve) and _try_mma_convolution(ctx, _without_library(step))


def _try_mma_convolution(ctx: Lowering, step: Convolve) -> bool:
    """Launch our tensor-core kernel where it can compute the step and no other was measured faster; return whether."""
    ways = matrix_convolution_tactics(ctx, step)
    way = ways.get(step.tactic.name or next(iter(ways), ""))
    if way is None:
        return False
    launch_matrix_convolution(ctx, step, way)
    explain(ctx, step)
    return True


def _call(ctx: Lowering, step: Sums) -> bool:
    match step:
        case Contract():
            return not step.is_converted and (call_cublaslt(ctx, step) or call_with_dense_batches(ctx, step))
        case Attend():
            return 0 not in step.shape and call_cudnn_attention(ctx, step)
        case Convolve():
            return 0 not in step.shape and call_cudnn(ctx, step)
    return False
