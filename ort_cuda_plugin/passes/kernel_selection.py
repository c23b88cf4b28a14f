"""Chooses what computes the sums of a product or convolution: a vendor library, or a kernel of ours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from ..kernels.dense_batches import call_with_dense_batches
from ..kernels.depthwise import is_depthwise, launch_depthwise
from ..kernels.image_layout import (
    is_channels_last,
    wants_channels_last,
    with_channels_last_result,
)
from ..kernels.library_attention import call_cudnn_attention
from ..kernels.library_calls import call_cublaslt, call_cudnn
from ..kernels.matrix_conv import launch_matrix_convolution, matrix_convolution_tactics
from ..kernels.tactics import LIBRARY, PARTS, Tuner, by_rules, explain, is_parted, parts_of, ruled, tactics
from ..program.elementwise import copy_into
from ..program.lowering import Lowering
from ..program.steps import Attend, Contract, Convolve, Map, Sums, Tactic
from ..program.trace import LibraryCall, Step
from ..program.views import part
from .channel_axes import join_channels
from .horizontal_conv import merge_convolutions
from .l2_batch_tiling import tile_batches_for_l2
from .layout_propagation import propagate_channels_last
from .loop_interchange import in_memory_order, unit_axis_last
from .pointwise_as_gemm import pointwise_as_gemm
from .table import Watch

AnyStep = TypeVar("AnyStep", bound=Step)


def choose(ctx: Lowering, steps: Sequence[Step], tuner: Tuner | None = None, watch: Watch | None = None) -> list[Step]:
    """The steps with calls of the libraries that the device offers, where these can do the sums.

    Such a call takes as much of the step's epilogue as the library has; what is left is a map after it. Guards of the
    calls join the trace's. With ``tuner`` what was measured goes before rules, and so does a tactic that a step has.
    ``watch`` sees the steps on the way.
    """

    def seen(name: str, steps: Iterable[Step]) -> list[Step]:
        found = list(steps)
        if watch:
            watch(f"choose, {name}", found)
        return found

    chosen: list[Step] = []
    joined = seen("attention and channels", (one for step in _parted(ctx, steps, tuner) for one in _joined(ctx, step)))
    ordered = seen("order of images", propagate_channels_last(ctx, joined))
    parted = seen("images in parts", tile_batches_for_l2(ctx, ordered))
    for step in seen("merged convolutions", merge_convolutions(ctx, parted)):
        with ctx.recording(step.nodes) as made:
            tuned = _tuned(ctx, pointwise_as_gemm(ctx, step), tuner)
            is_called = _is_called(ctx, tuned)
        if not is_called:
            with ctx.recording(step.nodes) as made:
                made.append(_readable(ctx, _without_library(tuned)))
        chosen += made
    return [unit_axis_last(in_memory_order(step)) if isinstance(step, Map) else step for step in chosen]


def _tuned(ctx: Lowering, step: Step, tuner: Tuner | None) -> Step:
    """The step with the tactic that is the fastest where that is known, or that rules prefer to a library."""
    if not isinstance(step, Sums) or step.tactic.name or _is_depthwise(ctx, step):
        return step
    names = tactics(ctx, step) if tuner is not None else []
    tuned = tuner.tactic(ctx, step, names) if tuner is not None and len(names) > 1 else Tactic()
    return replace(step, tactic=tuned if tuned.name else ruled(ctx, step))


def _parted(ctx: Lowering, steps: Sequence[Step], tuner: Tuner | None) -> Iterator[Step]:
    """The steps, with the parts of attention in its place where these are faster."""
    for step in steps:
        if not isinstance(step, Attend):
            yield step
            continue
        tuned = _tuned(ctx, step, tuner)
        assert isinstance(tuned, Attend)
        is_in_parts = tuned.tactic.name == PARTS if tuned.tactic.name else is_parted(ctx, step)
        yield from parts_of(ctx, tuned) if is_in_parts else (tuned,)


def _without_library(step: AnyStep) -> AnyStep:
    """The step that no library takes after all."""
    return replace(step, tactic=Tactic()) if isinstance(step, Sums) and step.tactic.name == LIBRARY else step


def _joined(ctx: Lowering, step: Step) -> Sequence[Step]:
    """The step as cuDNN may take it."""
    if not isinstance(step, Convolve) or step.channel_axes == 1 or "cudnn" not in ctx.device.libraries:
        return [step]
    ctx.nodes = step.nodes
    return join_channels(ctx, step)


def _readable(ctx: Lowering, step: Step) -> Step:
    """The step as our kernels take it: a convolution that no library does after all reads a dense image."""
    if not isinstance(step, Convolve) or step.operands[0].is_contiguous:
        return step
    x, w = step.operands
    image = part(ctx, x, 1, 0, step.groups * w.shape[1])
    return replace(step, operands=(ctx.contiguous(image), w))


def _is_called(ctx: Lowering, step: Step) -> bool:
    """Records the call of a library, or the kernel for channels-last images, that computes the step."""
    if not isinstance(step, Sums):
        return False
    if step.tactic.name in ("", LIBRARY):
        if _is_depthwise(ctx, step):
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
    return isinstance(step, Convolve) and _is_by_matrices(ctx, _without_library(step))


def _is_by_matrices(ctx: Lowering, step: Convolve) -> bool:
    """Launches the kernel of ours on tensor cores, where it can compute the step and no other was measured faster."""
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


def _is_depthwise(ctx: Lowering, step: Sums) -> bool:
    """Whether the step is a convolution of each channel by itself, in the order that cuDNN's images have."""
    return (
        isinstance(step, Convolve)
        and wants_channels_last(ctx, step)
        and is_channels_last(step.operands[0])
        and is_depthwise(ctx, step)
    )
