"""Rematerialization: a step recomputes one of its inputs from another of its inputs, instead of loading both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...program.expressions.scalar import Scalar
from ...program.steps.steps import Attend, Map, Output, Substitution, stored, used_inputs
from ...program.steps.tensor import BufferKind, Tensor
from ...program.steps.trace import Step
from ..analysis.uses import Uses
from .dead_code_elimination import eliminate_dead_code

MAX_OPERATIONS = 8
"""Maximum operations of a recomputed value: computing them takes less time than storing and loading the value."""


def rematerialize(steps: Sequence[Step]) -> list[Step]:
    """Recompute an input of a step that is a cheap function of another input of the same step, instead of loading
    it.

    Assumes: producers are fused, so that both inputs are results of one step.
    Guarantees: a recomputed value has the bits of the stored one. Values that no step loads after the pass are not
        stored.
    Example: ``h, q = h, h * h (stored); y = h / Sum(q)`` -> ``y = h / Sum(h * h)``, which reads h alone.
    """
    result = list(steps)
    uses = Uses(enumerate(steps))
    for position, step in enumerate(steps):
        if isinstance(step, Map) and not isinstance(step, Attend):
            result[position] = _with_fewer_reads(step, result, uses)
    return eliminate_dead_code(result)


def _with_fewer_reads(step: Map, steps: Sequence[Step], uses: Uses[int]) -> Map:
    made = {leaf: found for leaf, x in step.inputs if (found := _made_by(x, steps, uses)) is not None}
    replaced: dict[Scalar, Scalar] = {}
    for leaf, x in step.inputs:
        for other, beside in step.inputs:
            if leaf in replaced or other in replaced or other is leaf or leaf not in made or other not in made:
                continue
            (writer, (value, y)), (same, (source, kept)) = made[leaf], made[other]
            is_beside = same == writer and _is_at(y, kept) and _is_at(x, beside)
            if is_beside and value is not source and _is_made_of(value, source):
                replaced[leaf] = stored(Substitution({source: other})(value))
    if not replaced:
        return step
    changed = Substitution(replaced)
    result = step.map_values(changed)
    return replace(result, inputs=used_inputs(step.inputs, [value for value, _ in result.all_outputs]))


def _made_by(x: Tensor, steps: Sequence[Step], uses: Uses[int]) -> tuple[int, Output] | None:
    """Return (position of the only step that writes x's buffer, its only output there); else None."""
    writers = uses.writers(x.buffer)
    writer = steps[writers[0]] if len(writers) == 1 else None
    if x.buffer.kind is not BufferKind.SCRATCH or not isinstance(writer, Map):
        return None
    found = [output for output in writer.outputs if output[1].buffer is x.buffer]
    return (writers[0], found[0]) if len(found) == 1 and found[0][1].dtype is x.dtype else None


def _is_at(x: Tensor, y: Tensor) -> bool:
    """Return whether x and y have the same shape, strides and offset in their buffers."""
    return x.shape == y.shape and x.strides == y.strides and x.offset == y.offset


def _is_made_of(value: Scalar, source: Scalar) -> bool:
    """Return whether ``value`` is a function of ``source`` and constants with at most `MAX_OPERATIONS` operations."""
    stack, seen = [value], {source}
    while stack:
        x = stack.pop()
        if x in seen or x.op == "constant":
            continue
        if not x.operands or x.op in ("reduced", "load"):
            return False
        seen.add(x)
        stack += x.operands
    return len(seen) <= 1 + MAX_OPERATIONS
