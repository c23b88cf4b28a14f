"""Loop interchange: iterates elementwise steps over their dimensions in memory order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...kernels.conv.channels_last import place_stride, to_memory
from ...program.expressions.symbolic import hint
from ...program.lowering.shapes import broadcast_strides
from ...program.lowering.views import permuted
from ...program.steps.steps import Map
from ...program.steps.tensor import Tensor
from ...program.steps.trace import Step

__all__ = ["interchange_loops"]


def interchange_loops(steps: Sequence[Step]) -> list[Step]:
    """Interchange the loops of elementwise steps (maps), so that the innermost loop accesses adjacent elements.

    Assumes: layouts are final.
    Guarantees: a map of at least three dimensions is in the memory order of its first result, if that is an NHWC image.
        If all its tensors have stride 1 along one dimension, the last such dimension is innermost. The computation of
        each element does not change.
    Example: ``map over [n, c, h, w]`` of NHWC images -> ``map over [n, h, w, c]``.
    """
    return [_unit_axis_last(_in_memory_order(step)) if isinstance(step, Map) else step for step in steps]


def _in_memory_order(step: Map) -> Map:
    """Return the step with its dimensions in memory order if its first result is an NHWC image, else unchanged."""
    if type(step) is not Map or not step.outputs:
        return step
    result, rank = step.outputs[0][1], len(step.shape)
    if rank < 3 or result.is_contiguous or place_stride(result) is None:
        return step
    return permuted(step, to_memory(rank))


def _unit_axis_last(step: Map) -> Map:
    """Return the step with its axes in the first result's order, if all tensors have stride 1 along one but the last.

    Returns a step of fewer than three axes unchanged.
    """
    if type(step) is not Map or not step.outputs or len(step.shape) < 3:
        return step
    placed = [broadcast_strides(x, step.shape) for _, x in (*step.outputs, *step.inputs)]
    units = [axis for axis, dim in enumerate(step.shape) if dim != 1 and all(each[axis] == 1 for each in placed)]
    if not units or units[-1] == len(step.shape) - 1:
        return step
    order = sorted(range(len(step.shape)), key=lambda axis: hint(placed[0][axis]), reverse=True)
    order = [*(axis for axis in order if axis != units[-1]), units[-1]]

    def moved(x: Tensor) -> Tensor:
        strides = broadcast_strides(x, step.shape)
        shape = [step.shape[axis] for axis in order]
        return Tensor(x.dtype, shape, x.buffer, strides=[strides[axis] for axis in order], offset=x.offset)

    return replace(
        step,
        shape=tuple(step.shape[axis] for axis in order),
        inputs=tuple((leaf, moved(x)) for leaf, x in step.inputs),
        outputs=tuple((value, moved(y)) for value, y in step.outputs),
    )
