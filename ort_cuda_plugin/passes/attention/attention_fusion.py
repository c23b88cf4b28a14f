"""Attention fusion: matches a GEMM, a row program such as Softmax over its rows, and a second GEMM."""

from __future__ import annotations

from collections.abc import Sequence

from ...model.ir import NARROW_FLOATS, DType
from ...program.expressions.scalar import Scalar
from ...program.lowering.shapes import broadcast_strides
from ...program.steps.row_program import grouped_stages
from ...program.steps.steps import (
    Attend,
    Contract,
    Input,
    Map,
    Rows,
    Substitution,
    dense,
    joined_nodes,
    stored,
    used_inputs,
)
from ...program.steps.tensor import Tensor, contiguous_strides
from ...program.steps.trace import ReadBack, Step
from ..analysis.uses import Uses
from ..fusion.vertical_fusion import MAX_PARAMETERS, reads_all, rebased

TYPES = frozenset({DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})


def fuse_attention(steps: Sequence[Step]) -> list[Step]:
    """Fuse a GEMM, a row program such as Softmax over its rows, and a second GEMM into one attention step.

    Assumes: the masks and scales between the GEMMs are fused into the row program; the right operands of the GEMMs are
        not constant; nothing else reads the scores or the probabilities.
    Guarantees: scores are not stored. The attention step keeps the three steps as its ``parts``, for
        attention_decomposition.
    Example: ``s = MatMul(q, k); p = Softmax(s); y = MatMul(p, v)`` -> ``y = attention(q, k, v)``.
    """
    return _Attention(steps).run()


class _Attention:
    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps: list[Step | None] = list(steps)
        self.uses = Uses(enumerate(steps))

    def run(self) -> list[Step]:
        for position, step in enumerate(self.steps):
            if isinstance(step, Contract) and not step.is_converted and step.low_rank is None:
                self._attend(position, step)
        return [step for step in self.steps if step is not None]

    def _attend(self, position: int, second: Contract) -> None:
        """Replace ``second`` by an Attend step if it is the second GEMM of an attention pattern."""
        middle = self.uses.replaceable_writer(second.a.buffer, position, second)
        if middle is None or not _are_simple_axes(second):
            return
        rows = self.steps[middle]
        if not isinstance(rows, Rows) or rows.row_outputs or len(rows.outputs) != 1:
            return
        for leaf, x in rows.inputs:
            start = self.uses.replaceable_writer(x.buffer, middle, rows)
            first = None if start is None else self.steps[start]
            if start is None or not isinstance(first, Contract) or first.is_converted:
                continue
            if self._is_changed(start, position) or self._is_changed(middle, position):
                continue
            joint = _joint(first, rows, leaf, x, second)
            if joint is not None:
                self.steps[start] = self.steps[middle] = None
                self.steps[position] = joint
                return

    def _is_changed(self, start: int, end: int) -> bool:
        """Return whether fusing the step at ``start`` into the step at ``end`` would move it over a change of its
        inputs, or over a read-back.
        """
        step = self.steps[start]
        assert step is not None
        if any(isinstance(other, ReadBack) for other in self.steps[start:end]):
            return True
        return any(start < writer < end for buffer in step.reads for writer in self.uses.writers(buffer))


def _are_simple_axes(step: Contract) -> bool:
    return step.row_axes == 1 and step.column_axes == 1


def _joint(first: Contract, rows: Rows, leaf: object, x: Tensor, second: Contract) -> Attend | None:
    if not _are_simple_axes(first) or len(first.outputs) != 1 or rows.axes != {len(rows.shape) - 1}:
        return None
    if first.b.is_constant or second.b.is_constant or first.low_rank is not None:
        return None  # constant weights: a linear layer, not attention
    score, scores = first.outputs[0]
    weight, weights = rows.outputs[0]
    a, b, c = *first.operands, second.b
    if not dense(scores) or not dense(weights) or not {a.dtype, b.dtype, c.dtype} <= TYPES or second.a.dtype != c.dtype:
        return None
    if not reads_all(x, rows.shape, scores, contiguous_strides(rows.shape)):
        return None
    inputs: Sequence[Input] = rows.inputs
    if rows.shape != first.shape:
        moved = rebased(Map(rows.nodes, rows.shape, rows.inputs, ()), first.shape, x)
        if moved is None or first.shape[-1] != rows.shape[-1]:
            return None
        inputs = moved.inputs
    if second.a.shape != first.shape or second.shape[:-1] != first.shape[:-1]:
        return None
    if not reads_all(second.a, first.shape, weights, contiguous_strides(first.shape)):
        return None
    if not _is_attendable(weight):
        return None
    expression = Substitution({own: stored(score) for own, _ in inputs if own is leaf})(weight)
    joint = Attend(
        joined_nodes(first, rows, second),
        second.shape,
        second.inputs,
        second.outputs,
        operands=(a, b, c),
        total=second.total,
        parts=(first, rows, second),
        score=first.total,
        score_inputs=used_inputs((*first.inputs, *(pair for pair in inputs if pair[0] is not leaf)), [expression]),
        weight=stored(expression),
        row=rows.row,
    )
    return joint if _parameters(joint) <= MAX_PARAMETERS else None


def _parameters(step: Attend) -> int:
    """Return an upper bound of the number of parameters of the attention kernel."""
    batch = max(len(step.batch), 1)
    count = 12 + 4 * batch
    for shape, pairs in ((step.score_shape, step.score_inputs), (step.shape, (*step.inputs, *step.outputs))):
        strides = [stride for _, x in pairs for stride in broadcast_strides(x, shape)]
        count += len(pairs) + sum(not isinstance(s, int) or s not in (0, 1) for s in strides) + 2 * (batch - 1)
    return count


def _is_attendable(weight: Scalar) -> bool:
    """Return whether the row program that computes ``weight`` reduces one float value of at most 32 bits per score, as
    Softmax does.
    """
    groups = grouped_stages([weight])
    return all(len(group) == 1 and len(group[0].elements) == 1 and _is_single(group[0].elements[0]) for group in groups)


def _is_single(x: Scalar) -> bool:
    return x.dtype is DType.FLOAT32 or x.dtype in NARROW_FLOATS
