"""Horizontal fusion of small convolutions of one image into one kernel, as in the modules of Inception networks.

A small convolution takes about as long as its launch, and such modules run several on the same image (activation
tensor). One kernel computes the output channels of all. Each result keeps its own tensor and its own pixel stride, so
that the results may be slices of a concatenation and their readers do not change.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from ...kernels.conv.channels_last import matrix_convolution_kind, place_stride
from ...program.lowering.context import Lowering
from ...program.steps.steps import Convolve
from ...program.steps.trace import Step
from ...schedule.choose import has_integer_operands, scheduled
from ...schedule.conv import merged_conv_choice
from ..emission.emission import launch_step
from .horizontal_contraction import Merging, has_one_result, merge_contractions

__all__ = ["merge_convolutions"]


def merge_convolutions(ctx: Lowering, steps: Iterable[Step]) -> list[Step]:
    """Merge convolutions of one image that differ only in weights into one kernel; each result keeps its tensor.

    Assumes: images have their channels last; results have one writer.
    Guarantees: readers of the results do not change. The merged kernel takes less time than separate kernels, or no
        library computes the separate convolutions. The kernel's guards become guards of the plan.
    Example: ``a = Conv1x1(x, wa); b = Conv1x1(x, wb)`` -> ``a, b = launch(x, [wa wb])``.
    """
    return merge_contractions(steps, _Convolutions(ctx))


class _Convolutions(Merging[Convolve]):
    columns, weight_columns = 1, 0

    def __init__(self, ctx: Lowering) -> None:
        self.ctx = ctx

    def candidate(self, step: Step) -> Convolve | None:
        if not isinstance(step, Convolve) or step.schedule is not None or 0 in step.shape:
            return None
        if step.is_converted and not (all(step.conversions) and has_integer_operands(self.ctx, step)):
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
        return merged_conv_choice(self.ctx, merged, count) is not None

    def made(self, merged: Convolve, count: int) -> list[Step]:
        choice = merged_conv_choice(self.ctx, merged, count)
        assert choice is not None
        with self.ctx.recording(merged.nodes) as made:
            launch_step(self.ctx, scheduled(self.ctx, merged, choice))
        return made
