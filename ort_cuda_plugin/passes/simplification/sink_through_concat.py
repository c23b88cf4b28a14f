"""Sinks elementwise steps through a Concat, so that they fuse with the producers of its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...program.expressions.scalar import Scalar
from ...program.expressions.symbolic import Dim
from ...program.lowering.shapes import broadcast_strides
from ...program.steps.steps import Input, Map, Substitution, dense, joined_nodes, stored
from ...program.steps.tensor import BufferKind, Tensor, contiguous_strides
from ...program.steps.trace import ReadBack, Step
from ..analysis.affine_view import exact_quotient
from ..analysis.uses import Uses


def sink_through_concat(steps: Sequence[Step]) -> list[Step]:
    """Sink elementwise steps (maps) through a Concat to the producers of its inputs, so that map and producer fuse.

    Assumes: dead code is eliminated; a Concat is one map for each of its inputs.
    Guarantees: the number of launches does not grow: at most one input has no producer that the sunk map fuses with.
    Example: ``c = Concat(Exp(a), Exp(b)); y = Relu(c)`` -> ``y = Concat(Relu(Exp(a)), Relu(Exp(b)))``.
    """
    return _Spreading(steps).run()


@dataclass(frozen=True)
class Part:
    """The ``step`` at ``position``, which writes a slice of a concatenation: from index ``start`` on along ``axis``."""

    position: int
    step: Map
    axis: int
    start: Dim


class _Spreading:
    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps: list[Step | None] = list(steps)
        self.uses: Uses[int] = Uses(enumerate(steps))

    def run(self) -> list[Step]:
        for position, step in enumerate(self.steps):
            if type(step) is Map:
                self._spread(position, step)
        return [step for step in self.steps if step is not None]

    def _spread(self, position: int, step: Map) -> None:
        whole = [(leaf, x) for leaf, x in step.inputs if x.buffer.kind is BufferKind.SCRATCH]
        if len(whole) != 1 or any(self.uses.writers(x.buffer) for leaf, x in step.inputs if leaf is not whole[0][0]):
            return
        leaf, x = whole[0]
        if x.shape != step.shape or not dense(x) or list(self.uses.readers(x.buffer)) != [position]:
            return
        if any(len(self.uses.writers(y.buffer)) != 1 or y.shape != step.shape for _, y in step.outputs):
            return
        parts = self._parts(x)
        if parts is None or any(isinstance(other, ReadBack) for other in self.steps[parts[0].position : position]):
            return
        if sum(not self._is_joinable(part) for part in parts) > 1:
            return
        for part in parts:
            self._replace(part.position, _with_map(part, step, (leaf, x)))
        self._replace(position, None)

    def _replace(self, position: int, new: Map | None) -> None:
        old = self.steps[position]
        assert old is not None
        self.uses.leave(position, old)
        if new is not None:
            self.uses.enter(position, new)
        self.steps[position] = new

    def _parts(self, x: Tensor) -> list[Part] | None:
        """Return the steps that write x, in order, if each writes a slice of x and the slices tile x; else None."""
        parts: list[Part] = []
        end: Dim = 0
        for position in self.uses.writers(x.buffer):
            step = self.steps[position]
            if type(step) is not Map or len(step.outputs) != 1:
                return None
            y = step.outputs[0][1]
            if y.dtype is not x.dtype or y.shape != step.shape or y.rank != x.rank:
                return None
            pairs = zip(y.shape, y.strides, contiguous_strides(x.shape), strict=True)
            axes = [axis for axis, (dim, whole) in enumerate(zip(y.shape, x.shape, strict=True)) if dim != whole]
            if len(axes) != 1 or any(dim != 1 and stride != wanted for dim, stride, wanted in pairs):
                return None
            start = exact_quotient(y.offset, contiguous_strides(x.shape)[axes[0]])
            if start is None or start != end or (parts and parts[0].axis != axes[0]):
                return None
            parts.append(Part(position, step, axes[0], start))
            end = start + y.shape[axes[0]]
        return parts if len(parts) > 1 and end == x.shape[parts[0].axis] else None

    def _is_joinable(self, part: Part) -> bool:
        """Return whether the part's step is the only reader of an intermediate that a single step writes.

        The part's step then fuses with the writer.
        """
        for _, x in part.step.inputs:
            if list(self.uses.readers(x.buffer)) == [part.position] and x.buffer.kind is BufferKind.SCRATCH:
                writers = self.uses.writers(x.buffer)
                if len(writers) == 1 and isinstance(self.steps[writers[0]], Map):
                    return True
        return False


def _with_map(part: Part, step: Map, whole: Input) -> Map:
    """Return the part's step with the elementwise ``step`` applied to its result; ``whole`` is the concatenation that
    ``step`` reads.
    """
    shape, (value, _) = part.step.shape, part.step.outputs[0]

    def cut(x: Tensor) -> Tensor:
        strides = broadcast_strides(x, step.shape)
        dims = [1 if stride == 0 else dim for dim, stride in zip(shape, strides, strict=True)]
        return Tensor(x.dtype, dims, x.buffer, strides=strides, offset=x.offset + part.start * strides[part.axis])

    # A leaf stands for one tensor. With new leaves for each part, two parts of a tensor stay apart if a later fusion
    # joins them in one step.
    leaves = {leaf: Scalar(leaf.dtype, "leaf") for leaf, _ in step.inputs if leaf is not whole[0]}
    new = Substitution({whole[0]: stored(value), **leaves})
    others = [(leaves[leaf], x if x.size == 1 else cut(x)) for leaf, x in step.inputs if leaf in leaves]
    outputs = tuple((new(expression), cut(y)) for expression, y in step.outputs)
    return Map(joined_nodes(part.step, step), shape, (*part.step.inputs, *others), outputs)
