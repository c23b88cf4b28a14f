"""Why a step has its schedule, in words, and where people read it."""

from __future__ import annotations

from collections.abc import Iterable

from ..program.lowering.context import Lowering
from ..program.steps.schedule import Schedule, explained
from ..program.steps.trace import Launch, Step


def by_rules(ctx: Lowering) -> str:
    """Say that no measurement chose."""
    return "chosen by rules, which deterministic=1 pins" if ctx.options.deterministic else "chosen by rules"


def note_schedule(steps: Iterable[Step], schedule: Schedule, why: str) -> None:
    """Note the schedule at its launches among ``steps``, with the reason for it."""
    for launch in steps:
        if isinstance(launch, Launch):
            launch.schedule, launch.note = schedule, explained(schedule, why)
