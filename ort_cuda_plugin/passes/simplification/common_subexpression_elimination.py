"""Common subexpression elimination among the results of one step, for example of several equal quantizations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...program.steps.steps import Map, dense, used_inputs
from ...program.steps.tensor import BufferKind, Tensor
from ...program.steps.trace import Step
from ...program.termination import Measure
from ..analysis.expression_equality import are_equal
from ..analysis.uses import Uses
from .concat_elimination import Copy, with_view


def eliminate_common_subexpressions(steps: Sequence[Step]) -> list[Step]:
    """Store equal results of one step in one tensor, which all readers load.

    Assumes: equal computations of one input are fused into one step, for example several operators that quantize one
        tensor.
    Guarantees: no two dense intermediates of one step that have equal shapes and types, and no other writer, have equal
        expressions, unless a reader does not support the view of the other tensor.
    Example: ``a, b = Exp(x), Exp(x)`` -> ``a = Exp(x)``; the readers of b read a.
    """
    result = list(steps)
    uses = Uses(enumerate(steps))
    for position, step in enumerate(steps):
        measure = Measure("common_subexpression_elimination")
        while isinstance(step, Map):
            measure.fall(len(step.outputs), step.node)
            if not _drop_one(result, uses, position, step):
                break
            step = result[position]
    return result


def _drop_one(steps: list[Step], uses: Uses[int], position: int, step: Map) -> bool:
    tensors = dict(step.inputs)
    for number, (value, y) in enumerate(step.outputs):
        for other, kept in step.outputs[:number]:
            is_copy = _may_go(uses, y) and _may_go(uses, kept) and y.shape == kept.shape and y.dtype is kept.dtype
            if is_copy and are_equal(value, other, tensors) and _drop(steps, uses, position, Copy(number, y, kept)):
                return True
    return False


def _may_go(uses: Uses[int], y: Tensor) -> bool:
    """Return whether y is a whole intermediate with a single writer."""
    return y.buffer.kind is BufferKind.SCRATCH and dense(y) and len(uses.writers(y.buffer)) == 1


def _drop(steps: list[Step], uses: Uses[int], position: int, copy: Copy) -> bool:
    """Remove the duplicate output, and let its readers read the kept tensor. Return False if a reader does not support
    it.
    """
    step = steps[position]
    assert isinstance(step, Map)
    kept = replace(step, outputs=tuple(y for number, y in enumerate(step.outputs) if number != copy.number))
    values = [value for value, _ in kept.all_outputs]
    changed: dict[int, Step] = {position: replace(kept, inputs=used_inputs(step.inputs, values))}
    for user in dict.fromkeys(uses.readers(copy.source.buffer)):
        viewed = with_view(steps[user], copy)
        if viewed is None:
            return False
        changed[user] = viewed
    for user, new in changed.items():
        uses.leave(user, steps[user])
        uses.enter(user, new)
        steps[user] = new
    return True
