"""Split-K whose reduction is fused into the step that reads the result, such as a normalization of few rows.

A GEMM with few rows and a large k has few tiles. Split-K gives every multiprocessor a large tile, which loads fewer
bytes per operation than small tiles would. A separate reduction kernel would cost more time than split-K saves.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...kernels.gemm.dispatch import split_along_k
from ...program.lowering.context import Lowering
from ...program.steps.steps import Contract, Map, Sums
from ...program.steps.tensor import BufferKind
from ...program.steps.trace import ReadBack, Step
from ...schedule.gemm import fused_split_k
from ..analysis.uses import Uses
from .vertical_fusion import join_map

__all__ = ["fuse_split_k"]


def fuse_split_k(ctx: Lowering, steps: Sequence[Step]) -> list[Step]:
    """Split k of a GEMM with few tiles, and fuse the reduction of the partial sums into the result's reader.

    Assumes: the first step that reads the result is elementwise or a row program, such as a normalization.
    Guarantees: the partial sums are float32 tensors in a new buffer, and the reader adds them in a fixed order. The
        guards of the split become guards of the plan.
    Example: ``p = MatMul(a, b); y = LayerNorm(p + r)`` -> ``p[3] = MatMul over thirds of k; y = LayerNorm(p[0] + p[1] +
        p[2] + r)``.
    """
    result: list[Sequence[Step]] = [(step,) for step in steps]
    uses = Uses(enumerate(steps))
    for position, step in enumerate(steps):
        if not isinstance(step, Contract) or len(step.outputs) != 1 or 0 in step.shape:
            continue
        reader = _adding(steps, uses, position)
        parts = fused_split_k(ctx, step) if reader is not None else 1
        if reader is None or parts == 1:
            continue
        with ctx.recording(step.nodes) as made:
            part, added = split_along_k(ctx, step, parts)
        (consumer,) = result[reader]
        buffer = step.outputs[0][1].buffer
        is_kept = buffer.kind is BufferKind.OUTPUT or any(user != reader for user in uses.readers(buffer))
        assert isinstance(consumer, Map)
        joint = join_map(added, consumer, added.outputs if is_kept else ())
        if joint is not None:
            result[position], result[reader] = (*made, part), (joint,)
    return [step for group in result for step in group]


def _adding(steps: Sequence[Step], uses: Uses[int], position: int) -> int | None:
    """Return the position of the first step that reads the GEMM's result, if that step can add the partial sums.

    Returns None if another step needs the complete result earlier, for example a read-back.
    """
    step = steps[position]
    assert isinstance(step, Contract)
    ((_, y),) = step.outputs
    readers = uses.readers(y.buffer)
    if y.buffer.kind not in (BufferKind.SCRATCH, BufferKind.OUTPUT) or not readers or len(uses.writers(y.buffer)) != 1:
        return None
    reader = min(readers)
    consumer = steps[reader]
    if not isinstance(consumer, Map) or isinstance(consumer, Sums):
        return None
    between = range(position + 1, reader)
    if any(isinstance(steps[number], ReadBack) for number in between):
        return None
    written = (writer for buffer in step.reads for writer in uses.writers(buffer))
    return None if any(writer in between for writer in written) else reader
