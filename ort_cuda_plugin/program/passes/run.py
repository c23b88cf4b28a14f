"""The passes between lowering and the making of kernels, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from ..steps import Map, Output, used_inputs
from ..tensor import Buffer, BufferKind
from ..trace import ReadBack, Step
from .attend import attend
from .bundle import bundle
from .fuse import fuse
from .heads import group_heads
from .merge import merge
from .place import place
from .recompute import recompute
from .spread import spread
from .twins import twins

Watch: TypeAlias = Callable[[str, Sequence[Step]], None]
"""Is told the name of a pass, and the steps after it."""


def run_passes(
    recorded: Sequence[Step], fusion: bool, watch: Watch | None = None, *, attention: bool = True
) -> list[Step]:
    """The steps that are to be launched for those that operators recorded. Without ``fusion`` each stays its own.

    Without ``attention`` its products and softmax stay apart.
    """
    steps = list(recorded)
    if watch:
        watch("lowered", steps)
    for name, run in PASSES:
        if name == "live" or (fusion and (attention or name != "attend")):
            steps = run(steps)
            if watch:
                watch(name, steps)
    return steps


def live(steps: Sequence[Step]) -> list[Step]:
    """The steps that an output depends on, without what they would store for none."""
    needed: set[Buffer] = set()
    kept = []
    for step in reversed(steps):
        # What is read back may be the size of an output, or end a Run with an error: it counts as used.
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
    """The step without results that are intermediates that no step reads."""

    def used(outputs: tuple[Output, ...]) -> list[Output]:
        return [y for y in outputs if y[1].buffer in needed or y[1].buffer.kind is not BufferKind.SCRATCH]

    changed = step.map_outputs(used)
    if len(changed.all_outputs) == len(step.all_outputs):
        return step
    return replace(changed, inputs=used_inputs(changed.inputs, [x for x, _ in changed.all_outputs]))


PASSES: tuple[tuple[str, Callable[[Sequence[Step]], list[Step]]], ...] = (
    ("live", live),
    ("spread", spread),
    ("fuse", fuse),
    ("recompute", lambda steps: live(recompute(steps))),
    ("twins", twins),
    ("merge", merge),
    ("place", place),
    ("attend", attend),
    ("heads", group_heads),
    ("bundle", bundle),
)
