"""The passes between lowering and a plan: from the steps that operators record to launches, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from ...kernels.emit import emit
from ..lowering import Lowering
from ..tensor import Buffer, BufferKind
from ..trace import ReadBack, Recordable, Step
from .choose import choose
from .fuse import fuse
from .merge import merge
from .place import place

Watch: TypeAlias = Callable[[str, Sequence[Step]], None]
"""Is told the name of a pass, and the steps after it."""


def run_passes(ctx: Lowering, watch: Watch | None = None) -> list[Recordable]:
    """What the plan for the steps in ``ctx.trace`` does. Without the option ``fusion`` each step stays its own."""
    steps: list[Step] = list(ctx.trace.steps)
    if watch:
        watch("lowered", steps)
    for name, run in PASSES:
        if name == "live" or ctx.options.fusion:
            steps = run(steps)
            if watch:
                watch(name, steps)
    if ctx.device.libraries:
        steps = choose(ctx, steps)
        if watch:
            watch("choose", steps)
    launches = emit(ctx, steps)
    if watch:
        watch("emitted", launches)
    return launches


def live(steps: Sequence[Step]) -> list[Step]:
    """The steps that an output depends on."""
    needed: set[Buffer] = set()
    kept = []
    for step in reversed(steps):
        # What is read back may be the size of an output, or end a Run with an error: it counts as used.
        if isinstance(step, ReadBack) or any(
            buffer in needed or buffer.kind is BufferKind.OUTPUT for buffer in step.writes
        ):
            needed.update(step.reads)
            needed.update(step.writes)
            kept.append(step)
    kept.reverse()
    return kept


PASSES: tuple[tuple[str, Callable[[Sequence[Step]], list[Step]]], ...] = (
    ("live", live),
    ("fuse", fuse),
    ("merge", merge),
    ("place", place),
)
