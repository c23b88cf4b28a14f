"""Quarantine: the schedules and operators that failed the selftest on a device, so that plans avoid them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from .schedule import Schedule
from .steps import Attend, Convolve, Sums

__all__ = ["Quarantine", "Quarantined", "QuarantinedOperator", "QuarantinedSchedule", "family_of"]


@dataclass(frozen=True)
class QuarantinedSchedule:
    """A set of quarantined schedules: those of ``family`` with this engine and tile whose first operand has this
    ``type``.

    ``type`` is a short name such as "f16". ``tile`` is "" if the schedules with every tile are quarantined. ``case``
    names the selftest's check that failed.
    """

    family: str
    type: str
    engine: str
    tile: str
    reason: str = field(default="", compare=False)
    case: str = field(default="", compare=False)

    @property
    def schedule(self) -> str:
        """Return the schedule as text, such as "mma 64x64x32"."""
        return f"{self.engine} {self.tile}".strip()

    def __str__(self) -> str:
        return f"{self.family} {self.type} {self.schedule}"


@dataclass(frozen=True)
class QuarantinedOperator:
    """A quarantined operator, such as "Softmax" or "com.microsoft::FastGelu", for nodes that read elements of ``type``.

    ``type`` is a short name such as "f16". ``case`` names the selftest's check that failed.
    """

    operator: str
    type: str
    reason: str = field(default="", compare=False)
    case: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.operator} {self.type}"


Quarantined = QuarantinedSchedule | QuarantinedOperator


@dataclass(frozen=True)
class Quarantine:
    """The schedules and operators that are quarantined on a device."""

    entries: tuple[Quarantined, ...] = ()

    def allows(self, step: Sums, schedule: Schedule) -> bool:
        """Return whether the step may use the schedule."""
        return self.allows_schedule(family_of(step), step.operands[0].dtype.short, schedule)

    def allows_schedule(self, family: str, type_name: str, schedule: Schedule) -> bool:
        """Return whether steps of the family may use the schedule if their first operand has type ``type_name``."""
        if not self.entries:
            return True
        tile = "" if schedule.tile is None else schedule.tile.name
        own = {QuarantinedSchedule(family, type_name, schedule.engine.value, name) for name in ("", tile)}
        return own.isdisjoint(self.entries)

    def note(self, step: Sums) -> str:
        """Return a text that lists the step's quarantined schedules, to append to the reason for its schedule; "" for
        none.
        """
        names = [entry.schedule for entry in self._of(step)]
        return f"; quarantined by the selftest: {', '.join(names)}" if names else ""

    def why_none(self, step: Sums) -> str:
        """Return the reason why no schedule is left for the step, as text for users."""
        return f"no kernel is left for it on this device; {'; '.join(map(why, self._of(step)[:3]))}"

    def has(self, family: str) -> bool:
        """Return whether a schedule of the family is quarantined."""
        return any(isinstance(entry, QuarantinedSchedule) and entry.family == family for entry in self.entries)

    def _of(self, step: Sums) -> list[QuarantinedSchedule]:
        """Return the entries for the step's family and the type of its first operand."""
        of_step = family_of(step), step.operands[0].dtype.short
        found = (entry for entry in self.entries if isinstance(entry, QuarantinedSchedule))
        return [entry for entry in found if (entry.family, entry.type) == of_step]

    def refusal(self, operator: str, types: Collection[str]) -> str:
        """Return why nodes of the operator that read these element types cannot be claimed; "" if they can."""
        found = (entry for entry in self.entries if isinstance(entry, QuarantinedOperator))
        return next((why(entry) for entry in found if entry.operator == operator and entry.type in types), "")


def family_of(step: Sums) -> str:
    """Return the family of a step with a schedule: "gemm", "convolution" or "attention"."""
    return "convolution" if isinstance(step, Convolve) else "attention" if isinstance(step, Attend) else "gemm"


def why(entry: Quarantined) -> str:
    """Return the reason why a node cannot run because of ``entry``, as text for users."""
    return f"{entry} is quarantined on this device by ort-cuda-plugin selftest: {entry.reason}"
