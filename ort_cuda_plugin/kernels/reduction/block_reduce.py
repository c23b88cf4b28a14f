"""Reduction of a row's partial accumulators across the lanes of a warp and the warps of a block."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ...model.ir import NARROW_FLOATS
from ...program.expressions.scalar import Scalar
from ...program.steps.row_program import Stage, Values
from ..codegen.source import Emitter, register_type

WARP = 32
Accumulators: TypeAlias = dict[Stage, list[str]]
"""Variables that hold a row's accumulators, by stage. A stage is one reduction of the row program."""
Change: TypeAlias = Callable[[Stage, Values], Values]


class PartialResults:
    """Emitter of the updates of accumulators; ``current`` are those of the row whose code is being emitted."""

    def __init__(self, emit: Emitter) -> None:
        self.emit = emit
        self.current: Accumulators = {}
        self.inside = ""
        """Variable that tells whether the column being emitted exists for this thread; "" if it always does."""

    def started(self, stages: Sequence[Stage]) -> Accumulators:
        """Emit new accumulators with their initial values; return their variables."""
        names = {stage: [self.emit.fresh("a") for _ in stage.initial] for stage in stages}
        for stage in stages:
            for name, initial in zip(names[stage], stage.initial, strict=True):
                self.emit.line(f"{name} = {self.emit.value(initial)}")
        return names

    def update(self, stages: Sequence[Stage], change: Change) -> None:
        """Emit ``change`` of all stages' current accumulators. All new values are computed before any is assigned."""
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

    def combined(self, stage: Stage, totals: Values, other: Callable[[Stage, int, str], str]) -> Values:
        """Return ``totals`` combined with other accumulators of the stage.

        ``other(stage, number, name)`` returns the source of the accumulator that is combined with accumulator
        ``number``, which has the variable ``name``.
        """
        others = []
        for number, (total, name) in enumerate(zip(totals, self.current[stage], strict=True)):
            partner = Scalar(total.dtype, "accumulator")
            text = other(stage, number, name)
            variable = self.emit.fresh()
            self.emit.line(f"{variable} = {text}")
            self.emit.bind(partner, variable)
            others.append(partner)
        return stage.reduction.combine(totals, tuple(others))

    def combine_shared(self, stages: Sequence[Stage], parts: int) -> None:
        """Combine the accumulators of the row's ``parts`` warps through shared memory."""
        shared = self.shared_arrays(stages, parts)
        with self.emit.block(f"if lane % {WARP} == 0:"):
            self.copy_shared(stages, shared, f"lane // {WARP}", stores=True)
        self.emit.line("cuda.syncthreads()")
        self.copy_shared(stages, shared, "0", stores=False)
        with self.emit.block(f"for other in range(1, {parts}):"):
            self.update(stages, self.joined(shared, "other"))

    def shared_arrays(self, stages: Sequence[Stage], count: int) -> Accumulators:
        """Declare an array of ``count`` elements in shared memory for each accumulator of ``stages``."""
        shared: Accumulators = {}
        for stage in stages:
            shared[stage] = [self.emit.fresh("shared") for _ in stage.initial]
            for array, initial in zip(shared[stage], stage.initial, strict=True):
                self.emit.line(f"{array} = cuda.shared.array({count}, {register_type(initial.dtype)})")
        return shared

    def copy_shared(self, stages: Sequence[Stage], shared: Accumulators, index: str, *, stores: bool) -> None:
        """Load the current accumulators from ``index`` of `shared_arrays`, or store them there."""
        for stage in stages:
            for array, name in zip(shared[stage], self.current[stage], strict=True):
                target, source = (f"{array}[{index}]", name) if stores else (name, f"{array}[{index}]")
                self.emit.line(f"{target} = {source}")

    def joined(self, others: Accumulators, index: str = "") -> Change:
        """Return the change (`update`) that combines accumulators with ``others``.

        The ``others`` are variables; with ``index`` they are arrays, and the change combines element ``index`` of each.
        """
        subscript = f"[{index}]" if index else ""
        return functools.partial(self.combined, other=lambda stage, number, name: f"{others[stage][number]}{subscript}")

    def shuffled(self, distance: str) -> Change:
        """Return the change (`update`) that combines accumulators with those of the lane at index XOR ``distance``."""

        def text(stage: Stage, number: int, name: str) -> str:
            dtype = stage.initial[number].dtype
            if dtype in NARROW_FLOATS:
                return f"shfl_xor_f32({name}, {distance})"
            if dtype.itemsize >= 4:
                return f"shfl_xor_{dtype.short}({name}, {distance})"
            return f"{register_type(dtype)}(shfl_xor_i32(int32({name}), {distance}))"

        return functools.partial(self.combined, other=text)


def stepped(stage: Stage, totals: Values) -> Values:
    """Return the accumulators ``totals`` after one more element of a row."""
    return stage.reduction.step(totals, stage.elements)
