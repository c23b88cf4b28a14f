"""Horizontal fusion: one launch for independent elementwise steps of one shape, such as copies of keys and values."""

from __future__ import annotations

from collections.abc import Sequence

from ...program.expressions.symbolic import Dim, hint
from ...program.steps.steps import Map, joined_nodes
from ...program.steps.tensor import BufferKind
from ...program.steps.trace import ReadBack, Step
from ..simplification.concat_elimination import are_apart
from ..simplification.constant_folding import fixed_buffers, is_fixed
from .vertical_fusion import is_small, unified

MAX_BYTES = 1 << 20
"""Maximum bytes of intermediates that a moved step writes: moving the step earlier extends their lifetime."""


def fuse_horizontally(steps: Sequence[Step]) -> list[Step]:
    """Fuse independent elementwise steps (maps) of one shape into one launch, at the position of the first one.

    Assumes: vertical fusion is done, so that no map could fuse with its producers or consumers.
    Guarantees: a map moves only over steps that do not use its results or write its inputs. A map that constant folding
        computes once is not fused with maps that each Run computes.
    Example: ``k2 = Copy(k); v2 = Copy(v)`` of one shape -> ``k2, v2 = Copy(k), Copy(v)`` in one map.
    """
    result: list[Step] = []
    fixed = fixed_buffers(steps)
    places: dict[tuple[tuple[Dim, ...], bool], int] = {}
    for step in steps:
        if isinstance(step, ReadBack):
            places.clear()
        if type(step) is not Map:
            result.append(step)
            continue
        # constant folding computes some maps once; these do not fuse with the others
        key = step.shape, is_fixed(step, fixed)
        place = places.get(key)
        first = None if place is None else result[place]
        if place is not None and type(first) is Map and _may_move(step, result[place:]):
            joint = _joint(first, step)
            if is_small(joint):
                result[place] = joint
                continue
        places[key] = len(result)
        result.append(step)
    return result


def _may_move(step: Map, before: Sequence[Step]) -> bool:
    """Return whether the step may move to the position in front of the steps ``before``."""
    made = sum(hint(y.nbytes) for _, y in step.outputs if y.buffer.kind is not BufferKind.OUTPUT)
    reads, writes = set(step.reads), set(step.writes)
    return made <= MAX_BYTES and all(
        reads.isdisjoint(other.writes) and writes.isdisjoint(other.reads) and _writes_apart(step, other)
        for other in before
    )


def _writes_apart(step: Map, other: Step) -> bool:
    """Return whether the steps provably write disjoint memory: different buffers, or slices that do not overlap."""
    if not isinstance(other, Map):
        return set(step.writes).isdisjoint(other.writes)
    outputs = [y for _, y in other.all_outputs]
    return all(x.buffer is not y.buffer or are_apart(x, y) for _, x in step.outputs for y in outputs)


def _joint(first: Map, second: Map) -> Map:
    inputs, outputs = (*first.inputs, *second.inputs), (*first.outputs, *second.outputs)
    return unified(Map(joined_nodes(first, second), first.shape, inputs, outputs))
