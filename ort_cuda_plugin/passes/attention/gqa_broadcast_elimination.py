"""Removes the Expand that repeats K/V heads for grouped-query attention.

The query heads that share a K/V head become a dimension of their own, along which K and V have a stride of 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...model.ir import DType
from ...program.expressions.symbolic import Dim
from ...program.lowering.shapes import broadcast_strides
from ...program.steps.steps import Attend, Contract, Input, Map, Output, dense, joined_nodes
from ...program.steps.tensor import BufferKind, Tensor
from ...program.steps.trace import Step
from ..analysis.uses import Uses


def eliminate_gqa_broadcasts(steps: Sequence[Step]) -> list[Step]:
    """Remove the Expand that repeats K and V for the query heads of a group (grouped-query attention).

    Assumes: attention is one step; the copies that repeat K and V have no other reader.
    Guarantees: heads are two dimensions, groups and heads of a group; K and V have stride 0 along the heads of a group.
    Example: ``k [1, 2, 4, n, d] = Expand(cache [1, 2, 1, n, d]); attention(q, k, v)`` -> ``attention(q, cache,
        ...)``.
    """
    found: list[Step | None] = list(steps)
    uses: Uses[int] = Uses(enumerate(steps))
    for position, step in enumerate(steps):
        if not isinstance(step, Attend) or not step.batch or _is_for_cudnn(step):
            continue
        repeated = [_repeated(steps, uses, position, x, len(step.batch) - 1) for x in step.operands[1:]]
        keys, values = repeated
        if keys is None or values is None or keys.times != values.times:
            continue
        grouped = _grouped(step, keys, values)
        if not {*keys.step.writes, *values.step.writes}.isdisjoint(grouped.reads):
            continue  # the step also reads the repeated K or V elsewhere, for example in its epilogue
        found[position] = grouped
        for one in (keys, values):
            found[one.position] = None
    return [step for step in found if step is not None]


def _is_for_cudnn(step: Attend) -> bool:
    """Return whether cuDNN may compute the step, so that it must keep its two batch dimensions.

    cuDNN computes 16-bit attention whose keys do not grow from Run to Run.
    """
    *_, rows, keys = step.score_shape
    return step.operands[0].dtype is not DType.FLOAT32 and (isinstance(keys, int) or keys == rows)


@dataclass(frozen=True)
class _Repeated:
    """An Expand that repeats K or V: ``step`` at ``position`` copies ``tensor``, each head ``times`` times."""

    position: int
    step: Map
    times: int
    tensor: Tensor


def _repeated(steps: Sequence[Step], uses: Uses[int], position: int, x: Tensor, axis: int) -> _Repeated | None:
    """Return the Expand that writes x [batch..., heads, m, n] if only the step at ``position`` reads x, else None."""
    writers = uses.writers(x.buffer)
    if x.buffer.kind is not BufferKind.SCRATCH or list(uses.readers(x.buffer)) != [position] or len(writers) != 1:
        return None
    (start,) = writers
    step = steps[start]
    if type(step) is not Map or len(step.inputs) != 1 or len(step.outputs) != 1:
        return None
    ((leaf, source),), ((value, y),) = step.inputs, step.outputs
    if value is not leaf or not dense(y) or y.shape != step.shape or y.rank != x.rank + 1 or x.rank != axis + 3:
        return None
    if x.dtype is not source.dtype or any(start < writer < position for writer in uses.writers(source.buffer)):
        return None
    strides, times = broadcast_strides(source, step.shape), y.shape[axis + 1]
    if not isinstance(times, int) or times < 2 or strides[axis + 1] != 0:
        return None
    whole = (*y.shape[:axis], y.shape[axis] * times)
    along = (*y.strides[:axis], y.strides[axis + 1])
    if x.offset != 0 or x.shape[: axis + 1] != whole or x.strides[: axis + 1] != along:
        return None
    matrix = (axis + 2, axis + 3)
    if x.strides[-2:] != tuple(y.strides[i] for i in matrix):
        matrix = (axis + 3, axis + 2)
    if any(x.shape[i - 2] != y.shape[j] or x.strides[i - 2] != y.strides[j] for i, j in enumerate(matrix)):
        return None
    order = (*range(axis + 2), *matrix)
    tensor = Tensor(
        x.dtype,
        [step.shape[i] for i in order],
        source.buffer,
        strides=tuple(strides[i] for i in order),
        offset=source.offset,
    )
    return _Repeated(start, step, times, tensor)


def _grouped(step: Attend, keys: _Repeated, values: _Repeated) -> Attend:
    first, rows, second = step.parts
    assert isinstance(first, Contract)
    assert isinstance(second, Contract)
    a, _, _ = step.operands
    split = _Split(len(step.shape), len(step.batch) - 1, keys.times)
    return replace(
        step,
        nodes=joined_nodes(keys.step, values.step, step),
        shape=split.shape(step.shape),
        inputs=split.inputs(step.inputs),
        outputs=split.outputs(step.outputs),
        operands=(split(a), keys.tensor, values.tensor),
        score_inputs=split.inputs(step.score_inputs),
        parts=(split.contract(first, keys.tensor), rows, split.contract(second, values.tensor)),
    )


@dataclass(frozen=True)
class _Split:
    """Splits the heads, dimension ``axis``, into [heads / times, times], for tensors that broadcast to ``rank``
    dimensions.
    """

    rank: int
    axis: int
    times: int

    def shape(self, shape: Sequence[Dim]) -> tuple[Dim, ...]:
        heads = shape[self.axis]
        assert isinstance(heads, int)
        return (*shape[: self.axis], heads // self.times, self.times, *shape[self.axis + 1 :])

    def __call__(self, x: Tensor) -> Tensor:
        axis = x.rank - self.rank + self.axis
        if axis < 0:
            return x
        dim, stride = x.shape[axis], x.strides[axis]
        dims: tuple[Dim, ...] = (1, 1)
        if dim != 1:
            assert isinstance(dim, int)
            dims = (dim // self.times, self.times)
        return Tensor(
            x.dtype,
            (*x.shape[:axis], *dims, *x.shape[axis + 1 :]),
            x.buffer,
            strides=(*x.strides[:axis], stride * self.times, stride, *x.strides[axis + 1 :]),
            offset=x.offset,
        )

    def inputs(self, inputs: Sequence[Input]) -> tuple[Input, ...]:
        return tuple((leaf, self(x)) for leaf, x in inputs)

    def outputs(self, outputs: Sequence[Output]) -> tuple[Output, ...]:
        return tuple((value, self(y)) for value, y in outputs)

    def contract(self, step: Contract, b: Tensor) -> Contract:
        return replace(
            step,
            shape=self.shape(step.shape),
            inputs=self.inputs(step.inputs),
            outputs=self.outputs(step.outputs),
            operands=(self(step.a), b),
        )
