"""Fused squeeze-and-excitation: one kernel for two pointwise convolutions that have a single output pixel.

Squeeze-and-excitation multiplies the pooled channels of each image by two weight matrices. With a library, each GEMM is
a launch that takes longer to start than to compute, often followed by an elementwise kernel. Here every block computes
the whole first GEMM of its image, keeps the result in shared memory, and computes a part of the second GEMM. The
addresses of the weights do not depend on computed values, so the block loads the weights of both GEMMs at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...kernels.conv.squeeze_excite import choose_form, launch_chain
from ...model.ir import DType
from ...program.lowering.context import Lowering
from ...program.steps.steps import Convolve, dense
from ...program.steps.trace import ReadBack, Step
from ..analysis.uses import Uses

__all__ = ["fuse_squeeze_excite"]

_types = frozenset({DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})


def fuse_squeeze_excite(ctx: Lowering, steps: Sequence[Step]) -> list[Step]:
    """Launch the two pointwise convolutions of squeeze-and-excitation as one kernel, with the result of the first in
    shared memory.

    Assumes: epilogues are fused; kernels are generated for a GPU.
    Guarantees: one launch replaces both convolutions where it is faster than two library calls. The launch reads the
        same tensors.
    Example: ``h = Relu(Conv1x1(x, a)); y = Sigmoid(Conv1x1(h, b))`` with one output pixel -> ``y = launch(x, a,
        b)``.
    """
    found: list[Step | None] = list(steps)
    uses = Uses(enumerate(steps))
    for number, step in enumerate(steps):
        second = _simple(step)
        start = None if second is None else uses.replaceable_writer(second.operands[0].buffer, number, second)
        first = None if start is None else _simple(found[start])
        if second is None or start is None or first is None or not _feeds(first, second):
            continue
        form = choose_form(ctx, first, second)
        if form is not None and not _is_changed(uses, steps, start, number):
            found[start], found[number] = None, launch_chain(ctx, form, first, second)
    return [step for step in found if step is not None]


def _simple(step: Step | None) -> Convolve | None:
    """Return the step if it is a pointwise convolution of one output pixel, with one result of the operands' type.

    Returns None for other steps, and for a convolution with prologues, a schedule, groups or strided operands.
    """
    if not isinstance(step, Convolve) or step.transposed or step.is_converted or step.schedule is not None:
        return None
    x, w = step.operands
    is_simple = (
        step.groups == step.channel_axes == 1
        and step.windows.pointwise
        and all(size == 1 for size in step.windows.size)
        and x.dtype in _types
        and x.is_contiguous
        and w.is_contiguous
        and len(step.outputs) == 1
        and step.outputs[0][1].dtype is x.dtype
    )
    return step if is_simple else None


def _feeds(first: Convolve, second: Convolve) -> bool:
    """Return whether the second convolution, which reads the first one's result, reads it in the same dense shape."""
    x, y = second.operands[0], first.outputs[0][1]
    return dense(y) and dense(x) and x.shape == y.shape


def _is_changed(uses: Uses[int], steps: Sequence[Step], start: int, end: int) -> bool:
    """Return whether a step before ``end`` may change the inputs of the step at ``start``, or is a read-back."""
    if any(isinstance(step, ReadBack) for step in steps[start:end]):
        return True
    return any(start < writer < end for buffer in steps[start].reads for writer in uses.writers(buffer))
