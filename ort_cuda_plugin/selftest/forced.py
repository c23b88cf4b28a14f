"""Tuners, which choose the schedules of a session's steps: one lists the candidates, one forces a candidate."""

from __future__ import annotations

from collections.abc import Sequence

from ..program.lowering.context import Lowering, Tuner
from ..program.steps.quarantine import family_of
from ..program.steps.schedule import Choice, Engine, Schedule
from ..program.steps.steps import Sums
from ..schedule.choose import library_epilogue

Candidate = tuple[str, str, Schedule]
"""The family of a step, the type of its first operand, and a schedule for it."""


class Noting(Tuner):
    """A tuner that records all candidates in ``found``, and lets the cost model's rules choose."""

    def __init__(self) -> None:
        self.found: dict[Candidate, None] = {}

    def choice(self, ctx: Lowering, step: Sums, choices: Sequence[Choice]) -> Choice | None:
        for choice in choices:
            self.found.setdefault((family_of(step), step.operands[0].dtype.short, choice.schedule))
        return None


class Forcing(Noting):
    """A tuner that chooses ``candidate`` for each step that has this candidate; rules choose for the others.

    ``epilogue`` is that of the library's call for the first of these steps; "" if the candidate is not a call.
    """

    def __init__(self, candidate: Candidate) -> None:
        super().__init__()
        self._candidate = candidate
        self.was_used = False
        self.epilogue = ""

    def choice(self, ctx: Lowering, step: Sums, choices: Sequence[Choice]) -> Choice | None:
        family, dtype, schedule = self._candidate
        if (family, dtype) != (family_of(step), step.operands[0].dtype.short):
            return None
        for choice in choices:
            if choice.schedule == schedule:
                self.was_used = True
                if schedule.engine is Engine.LIBRARY:
                    self.epilogue = self.epilogue or library_epilogue(ctx, step)
                return choice
        return None
