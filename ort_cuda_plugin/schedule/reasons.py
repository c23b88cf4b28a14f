"""Reasons why a schedule was selected, as texts for users, which launches store."""

from __future__ import annotations

from collections.abc import Iterable

from ..program.lowering.context import Lowering
from ..program.steps.schedule import Schedule, describe
from ..program.steps.trace import Launch, Step


def by_rules(ctx: Lowering) -> str:
    """Return the reason for a schedule that was selected without measurements."""
    why = "since deterministic=1 forbids measuring" if ctx.options.deterministic else "not measured"
    return f"chosen by rules, {why}"


def note_schedule(steps: Iterable[Step], schedule: Schedule, why: str) -> None:
    """Store the schedule and its reason in the launches among ``steps``."""
    for launch in steps:
        if isinstance(launch, Launch):
            launch.schedule, launch.note = schedule, f"{describe(schedule)}: {why}"
