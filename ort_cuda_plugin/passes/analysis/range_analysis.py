"""Value range analysis: bounds on the magnitude of each tensor that hold for any input.

After a row is divided by its root mean square, no element exceeds the square root of the row's length. Bounds of
GEMMs and activations follow from their inputs' bounds and the weights. Bounds are tensors that depend on weights only,
so the device computes them once, not in each Run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ...kernels.codegen.source import constant_number
from ...model.ir import DType, Node
from ...program.expressions import scalar as s
from ...program.expressions.scalar import Scalar, reachable
from ...program.expressions.symbolic import product
from ...program.lowering.context import Lowering, Tensor
from ...program.lowering.reduce import reduce, row_map
from ...program.lowering.shapes import broadcast_strides
from ...program.steps.row_program import MAX, SUM, Row
from ...program.steps.steps import Contract, Map, Rows, Substitution, Sums, used_inputs
from ...program.steps.tensor import Buffer
from ...program.steps.trace import Step
from .bounded_patterns import OF_UNIT, ROUNDING, BoundedPatterns

__all__ = ["RangeAnalysis"]


@dataclass(frozen=True)
class _Limited:
    """The bounds of a tensor: ``columns`` bounds, one for each index of the last dimension, or a single bound (1).

    ``make`` records the steps that compute the bounds, and returns their tensor.
    """

    columns: int
    make: Callable[[], Tensor]


class RangeAnalysis:
    """Bounds on the magnitudes of the float32 tensors that steps write.

    The pass that needs the bounds calls `note` for each step in program order.
    """

    def __init__(self, ctx: Lowering) -> None:
        self.ctx = ctx
        self.steps: list[Step] = []
        """The steps that compute the bounds that `of` and `largest` have returned."""
        self._known: dict[Buffer, _Limited] = {}
        self._made: dict[Buffer, Tensor] = {}
        self._uniform: dict[Buffer, Tensor] = {}

    def __contains__(self, buffer: Buffer) -> bool:
        return buffer in self._known

    def of(self, buffer: Buffer) -> Tensor:
        """Return the bounds of the tensor in ``buffer``: a vector with a bound per column, or one element."""
        if buffer not in self._made:
            self._made[buffer] = self._known[buffer].make()
        return self._made[buffer]

    def largest(self, buffer: Buffer) -> Tensor:
        """Return the largest bound of the tensor in ``buffer``, as a tensor of one element."""
        if buffer not in self._uniform:
            limits = self.of(buffer)
            with self.recording(()):
                one = limits if limits.size == 1 else reduce(self.ctx, lambda row, x: row.reduce(MAX, x), limits, [0])
            self._uniform[buffer] = one
        return self._uniform[buffer]

    def column_count(self, buffer: Buffer) -> int:
        """Return the number of columns with separate bounds; 1 if one bound holds for all columns."""
        return self._known[buffer].columns

    def pass_on(self, source: Buffer, target: Buffer) -> None:
        """Record that each element of ``target`` is a weighted mean of elements of ``source`` (attention)."""
        self._known[target] = _Limited(1, lambda: self.largest(source))

    def note(self, step: Map) -> None:
        """Derive the bounds of the step's results from the bounds of its inputs."""
        if type(step) not in (Map, Rows, Contract) or (isinstance(step, Sums) and step.is_converted):
            return
        columns = step.shape[-1] if step.shape else None
        if not isinstance(columns, int) or (isinstance(step, Contract) and (step.column_axes > 1 or step.column_parts)):
            return
        numbers = {leaf: float(number) for leaf, x in step.inputs if (number := constant_number(x)) is not None}
        search = _Search(self._leaves(step), BoundedPatterns(numbers, self._row_length(step)))
        for value, y in step.outputs:
            limit = search.limit(value) if y.dtype is DType.FLOAT32 else None
            if limit is not None and y.shape == step.shape:
                self._known[y.buffer] = _Limited(columns, self._maker(step, limit, columns))

    @contextmanager
    def recording(self, nodes: tuple[Node, ...]) -> Iterator[None]:
        """Append the steps that the ``with`` block records to `steps`, the program that computes the bounds."""
        with self.ctx.recording(nodes) as steps:
            yield
        self.steps += steps

    def _leaves(self, step: Map) -> dict[Scalar, bool]:
        """Return for each leaf of the step whether the tensor that it reads has a bound."""
        found = {leaf: self._has_limit(step, x) for leaf, x in step.inputs}
        if isinstance(step, Contract):
            weights = step.b.rank == 2 and step.b.is_constant and step.b.dtype is DType.FLOAT32
            weights &= step.low_rank is None
            found[step.total] = weights and self._has_columns(step.a, step.a.shape[-1])
        return found

    def _has_limit(self, step: Map, x: Tensor) -> bool:
        if x.dtype is not DType.FLOAT32:
            return False
        if x.is_constant:
            return all(stride == 0 for stride in broadcast_strides(x, step.shape)[:-1])
        return self._has_columns(x, step.shape[-1])

    def _has_columns(self, x: Tensor, columns: object) -> bool:
        """Return whether the bounds of x's buffer apply to x: a single bound, or bound j for column j of x."""
        limited = self._known.get(x.buffer)
        if limited is None:
            return False
        return limited.columns == 1 or (x.shape[-1] == columns == limited.columns and x.is_contiguous)

    @staticmethod
    def _row_length(step: Map) -> int:
        length = product(step.shape[axis] for axis in step.axes) if isinstance(step, Rows) else 0
        return length if isinstance(length, int) else 0

    def _maker(self, step: Map, limit: Scalar, columns: int) -> Callable[[], Tensor]:
        def make() -> Tensor:
            used = reachable([limit])
            inputs = []
            if isinstance(step, Contract) and step.total in used:
                inputs.append((step.total, self._of_sums(step)))
            changed = {}
            for leaf, x in used_inputs(step.inputs, [limit]):
                if x.is_constant:
                    own = Scalar(leaf.dtype, "leaf")
                    changed[leaf] = s.absolute(own)
                    stride = broadcast_strides(x, step.shape)[-1]
                    inputs.append((own, self.ctx.view(x, (columns,), (stride,), x.offset)))
                else:
                    inputs.append((leaf, self._along(x, columns)))
            with self.recording(step.nodes):
                result = self.ctx.empty((columns,), DType.FLOAT32)
                value = Substitution(changed)(limit) * ROUNDING
                self.ctx.record(Map(step.nodes, (columns,), tuple(inputs), ((value, result),)))
            return result

        return make

    def _along(self, x: Tensor, columns: int) -> Tensor:
        limits = self.of(x.buffer)
        return self.ctx.view(limits, (columns,), (0 if limits.size == 1 else 1,), limits.offset)

    def _of_sums(self, step: Contract) -> Tensor:
        """Return the bounds of a GEMM's accumulators: the bounds of operand a times the magnitudes of the weights."""
        depth, columns = step.b.static_shape
        limits = self.of(step.a.buffer)
        along = self.ctx.view(limits, (depth, 1), (0 if limits.size == 1 else 1, 0), limits.offset)

        def total(row: Row, w: Scalar, limit: Scalar) -> tuple[list[Scalar], list[Scalar]]:
            return [], [row.reduce(SUM, s.absolute(w) * limit)]

        with self.recording(step.nodes):
            (sums,) = row_map(self.ctx, total, [0], step.b, along)
        return self.ctx.view(sums, (columns,))


@dataclass(frozen=True)
class _Search:
    """Derives bounds of a step's expressions. ``leaves`` says which leaves have a bound."""

    leaves: dict[Scalar, bool]
    patterns: BoundedPatterns

    def limit(self, value: Scalar) -> Scalar | None:
        """Return a bound of ``value`` as an expression whose leaves stand for the leaves' bounds; None if no bound can
        be derived.
        """
        known: dict[Scalar, Scalar | None] = {}
        stack = [value]
        while stack:
            x = stack[-1]
            if x in known:
                stack.pop()
            elif self.patterns.is_normalized(x):
                known[x] = s.constant(math.sqrt(self.patterns.row_length), DType.FLOAT32)
            else:
                missing = [operand for operand in x.operands if operand not in known]
                stack += missing
                if not missing:
                    known[x] = self._limit_of(x, [known[operand] for operand in x.operands])
        return known[value]

    def _limit_of(self, x: Scalar, operands: list[Scalar | None]) -> Scalar | None:
        if x.op == "leaf":
            return x if self.leaves.get(x) else None
        if x.op == "constant":
            return s.constant(abs(x.value), DType.FLOAT32) if x.dtype.is_float and math.isfinite(x.value) else None
        if x.op in OF_UNIT:
            return s.constant(1.0, DType.FLOAT32)
        if x.op == "div" and self.patterns.is_above_one(x.operands[1]):
            return operands[0]
        values = operands[1:] if x.op == "where" else operands
        if not x.dtype.is_float or not values or any(value is None for value in values):
            return None
        first, *others = (value for value in values if value is not None)
        if x.op in ("neg", "abs", "cast"):
            return first
        if x.op in ("add", "sub"):
            return first + others[0]
        if x.op == "mul":
            return first * others[0]
        if x.op in ("min", "max", "where"):
            return s.maximum(first, others[0])
        return None
