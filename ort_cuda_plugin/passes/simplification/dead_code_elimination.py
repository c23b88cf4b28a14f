"""Dead code elimination: drops steps and results that no output of the cluster needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...program.steps.steps import Map, Output, used_inputs
from ...program.steps.tensor import Buffer, BufferKind
from ...program.steps.trace import ReadBack, Step


def eliminate_dead_code(steps: Sequence[Step]) -> list[Step]:
    """Drop the steps and the results that no output depends on.

    Assumes: nothing but the invariants.
    Guarantees: a later step reads each intermediate that an elementwise step stores. Steps whose values the host reads
        back stay: the value may be the size of an output, or make a Run fail.
    Example: ``a = Exp(x); y = Neg(x)`` -> ``y = Neg(x)``, where only y is an output.
    """
    needed: set[Buffer] = set()
    kept = []
    for step in reversed(steps):
        # A value that the host reads back counts as used: it may be the size of an output, or an error check of a Run.
        if isinstance(step, ReadBack) or any(
            buffer in needed or buffer.kind is BufferKind.OUTPUT for buffer in step.writes
        ):
            if isinstance(step, Map):
                step = _without_unused(step, needed)
            needed.update(step.reads)
            needed.update(step.writes)
            kept.append(step)
    kept.reverse()
    return kept


def _without_unused(step: Map, needed: set[Buffer]) -> Map:
    """Return the step without the intermediate results that no later step reads."""

    def used(outputs: tuple[Output, ...]) -> list[Output]:
        return [y for y in outputs if y[1].buffer in needed or y[1].buffer.kind is not BufferKind.SCRATCH]

    if len(used(step.all_outputs)) == len(step.all_outputs):
        return step
    changed = step.map_outputs(used)
    return replace(changed, inputs=used_inputs(changed.inputs, [x for x, _ in changed.all_outputs]))
