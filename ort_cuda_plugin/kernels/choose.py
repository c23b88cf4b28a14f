"""Chooses what computes the sums of a product or convolution: a vendor library, or a kernel of ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..program.lowering import Lowering
from ..program.steps import Attend, Contract, Convolve, Map
from ..program.symbolic import hint
from ..program.trace import Step
from ..program.views import part
from .attend_matrices import fits_matrices
from .depthwise import is_depthwise, launch_depthwise
from .image_order import in_memory_order, is_channels_last, order_images, wants_channels_last
from .library_attention import attention_form, call_cudnn_attention
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
    for step in order_images(ctx, list(_without_large_attention(ctx, steps))):
        ctx.trace.steps, ctx.nodes = [], step.nodes
        if not _is_called(ctx, step):
            ctx.trace.steps = []
            ctx.trace.steps.append(_readable(ctx, step))
        chosen += ctx.trace.steps
    ctx.trace.steps, ctx.nodes = recorded, nodes
    return [in_memory_order(step) if isinstance(step, Map) else step for step in chosen]


def _without_large_attention(ctx: Lowering, steps: Sequence[Step]) -> Iterator[Step]:
    """The steps with the parts of attention where tensor cores win more than trips through memory cost.

    Attention stays whole that cuDNN computes, or a kernel of ours on tensor cores.
    """
    for step in steps:
        if isinstance(step, Attend) and "cublaslt" in ctx.device.libraries:
            *_, rows, keys = step.score_shape
            is_large = hint(rows) * hint(keys) > SMALL_ATTENTION
            if is_large and attention_form(ctx, step) is None and fits_matrices(ctx, step) is None:
                yield from step.parts
                continue
        yield step


def _readable(ctx: Lowering, step: Step) -> Step:
    """The step as our kernels take it: a convolution that no library does after all reads a dense image."""
    if not isinstance(step, Convolve) or step.operands[0].is_contiguous:
        return step
    x, w = step.operands
    image = part(ctx, x, 1, 0, step.groups * w.shape[1])
    return replace(step, operands=(ctx.contiguous(image), w))


def _is_called(ctx: Lowering, step: Step) -> bool:
    if isinstance(step, Contract):
        return not step.is_converted and call_cublaslt(ctx, step)
    if isinstance(step, Attend):
        return 0 not in step.shape and call_cudnn_attention(ctx, step)
    if not isinstance(step, Convolve):
        return False
    if wants_channels_last(ctx, step) and is_channels_last(step.operands[0]) and is_depthwise(ctx, step):
        launch_depthwise(ctx, step)
        return True
    return 0 not in step.shape and call_cudnn(ctx, step)
