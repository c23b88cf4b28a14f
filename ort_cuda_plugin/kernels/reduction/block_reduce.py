"""Block reduction: accumulators of a row, and their reduction across the lanes of a warp and the warps of a block."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ...model.ir import NARROW_FLOATS, DType
from ...program.expressions.scalar import Scalar
from ...program.steps.row_program import Stage, Values
from ..codegen.source import Emitter, register_type

__all__ = ["WARP", "Accumulators", "PartialResults", "stepped"]

WARP = 32
Accumulators: TypeAlias = dict[Stage, list[str]]
"""Variables of a row's accumulators, by stage."""
Change: TypeAlias = Callable[[Stage, Values], Values]


class PartialResults:
    """Emitter of a row's reductions; ``current`` are the accumulators of the row that is being emitted."""

    def __init__(self, emit: Emitter) -> None:
        self.emit = emit
        self.current: Accumulators = {}
        self.inside = ""
        """Condition that the lane being emitted has an element; "" if all have."""

    def started(self, stages: Sequence[Stage]) -> Accumulators:
        """Emit accumulators with the initial values; return their variables."""
        names = {stage: [self.emit.fresh("a") for _ in stage.initial] for stage in stages}
        for stage in stages:
            for name, initial in zip(names[stage], stage.initial, strict=True):
                self.emit.line(f"{name} = {self.emit.value(initial)}")
        return names

    def joined(self, stage: Stage, totals: Values, other: Accumulators) -> Values:
        """Return ``totals`` combined with the accumulators ``other``."""
        return self.combined(stage, totals, lambda dtype, name, number: other[stage][number])

    def update(self, stages: Sequence[Stage], change: Change) -> None:
        """Emit new values of all stages' accumulators; compute all values before the first assignment."""
        pending = []
        for stage in stages:
            names = self.current[stage]
            totals = tuple(Scalar(x.dtype, "accumulator") for x in stage.initial)
            for total, name in zip(totals, names, strict=True):
                self.emit.bind(total, name)
            values = [self.emit.value(x) for x in change(stage, totals)]
            pending += list(zip(names, values, strict=True))
        for name, value in pending:
            self.emit.line(f"{name} = choose({self.inside}, {value}, {name})" if self.inside else f"{name} = {value}")

    def combined(self, stage: Stage, totals: Values, other: Callable[[DType, str, int], str]) -> Values:
        """Return ``totals`` combined with partial accumulators whose source ``other`` returns."""
        others = []
        for number, (total, name) in enumerate(zip(totals, self.current[stage], strict=True)):
            partner = Scalar(total.dtype, "accumulator")
            text = other(total.dtype, name, number)
            variable = self.emit.fresh()
            self.emit.line(f"{variable} = {text}")
            self.emit.bind(partner, variable)
            others.append(partner)
        return stage.reduction.combine(totals, tuple(others))

    def combine_shared(self, stages: Sequence[Stage], parts: int) -> None:
        """Combine the partial results of the block's warps."""
        shared = self.shared_arrays(stages, parts)
        with self.emit.block(f"if lane % {WARP} == 0:"):
            self.to_shared(stages, shared, f"lane // {WARP}")
        self.emit.line("cuda.syncthreads()")
        self.from_shared(stages, shared, "0")
        with self.emit.block(f"for other in range(1, {parts}):"):
            self.update(stages, self.combined_with(shared, "other"))

    def shared_arrays(self, stages: Sequence[Stage], count: int) -> Accumulators:
        """Declare shared arrays of ``count`` accumulators for ``stages``."""
        shared: Accumulators = {}
        for stage in stages:
            shared[stage] = [self.emit.fresh("shared") for _ in stage.initial]
            for array, initial in zip(shared[stage], stage.initial, strict=True):
                self.emit.line(f"{array} = cuda.shared.array({count}, {register_type(initial.dtype)})")
        return shared

    def to_shared(self, stages: Sequence[Stage], shared: Accumulators, index: str) -> None:
        """Store the accumulators at ``index`` of `shared_arrays`."""
        for stage in stages:
            for array, name in zip(shared[stage], self.current[stage], strict=True):
                self.emit.line(f"{array}[{index}] = {name}")

    def from_shared(self, stages: Sequence[Stage], shared: Accumulators, index: str) -> None:
        """Load the accumulators from ``index`` of `shared_arrays`."""
        for stage in stages:
            for array, name in zip(shared[stage], self.current[stage], strict=True):
                self.emit.line(f"{name} = {array}[{index}]")

    def combined_with(self, shared: Accumulators, index: str) -> Change:
        """Return the change that combines accumulators with those at ``index`` of `shared_arrays`."""

        def combine(stage: Stage, totals: Values) -> Values:
            return self.combined(stage, totals, lambda dtype, name, number: f"{shared[stage][number]}[{index}]")

        return combine

    def shuffled(self, distance: str) -> Change:
        """Return the change that combines the lane's accumulators with those of the lane at index XOR ``distance``."""
        return functools.partial(self.combined, other=_shuffled(distance))


def stepped(stage: Stage, totals: Values) -> Values:
    """Return ``totals`` after one more element."""
    return stage.reduction.step(totals, stage.elements)


def _shuffled(distance: str) -> Callable[[DType, str, int], str]:
    """Return a function that returns the source of an accumulator of the lane at index XOR ``distance``."""

    def text(dtype: DType, name: str, number: int) -> str:
        if dtype in NARROW_FLOATS:
            return f"shfl_xor_f32({name}, {distance})"
        if dtype.itemsize >= 4:
            return f"shfl_xor_{dtype.short}({name}, {distance})"
        return f"{register_type(dtype)}(shfl_xor_i32(int32({name}), {distance}))"

    return text
