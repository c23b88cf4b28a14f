"""Quarantine: schedules and operators that failed the selftest on a device, and that plans therefore avoid."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from .schedule import Schedule
from .steps import Attend, Convolve, Sums

__all__ = ["Quarantine", "Quarantined", "QuarantinedOperator", "QuarantinedSchedule", "family_of"]


@dataclass(frozen=True)
class QuarantinedSchedule:
    """The schedules of a family with this engine and tile, for the short name of the first operand's type, as "f16".

    ``tile`` is "" if the schedules with every tile are quarantined. ``case`` names the check that failed.
    """

    family: str
    type: str
    engine: str
    tile: str
    reason: str = field(default="", compare=False)
    case: str = field(default="", compare=False)

    @property
    def schedule(self) -> str:
        """Return the schedule as text, as "mma 64x64x32"."""
        return f"{self.engine} {self.tile}".strip()

    def __str__(self) -> str:
        return f"{self.family} {self.type} {self.schedule}"


@dataclass(frozen=True)
class QuarantinedOperator:
    """The nodes of an operator, as "Softmax" or "com.microsoft::FastGelu", that read an element type, as "f16".

    ``case`` names the check that failed.
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
    """What is quarantined on a device."""

    entries: tuple[Quarantined, ...] = ()

    def allows(self, step: Sums, schedule: Schedule) -> bool:
        """Return whether the step may have the schedule."""
        return self.allows_schedule(family_of(step), step.operands[0].dtype.short, schedule)

    def allows_schedule(self, family: str, type_name: str, schedule: Schedule) -> bool:
        """Return whether steps of the family may have the schedule for operands of the type."""
        if not self.entries:
            return True
        tile = "" if schedule.tile is None else schedule.tile.name
        own = {QuarantinedSchedule(family, type_name, schedule.engine.value, name) for name in ("", tile)}
        return own.isdisjoint(self.entries)

    def note(self, step: Sums) -> str:
        """Return what to add to the reason for the step's schedule: the schedules that the step must not have."""
        names = [entry.schedule for entry in self._of(step)]
        return f"; quarantined by the selftest: {', '.join(names)}" if names else ""

    def why_none(self, step: Sums) -> str:
        """Return the reason for users why the step has no schedule left."""
        return f"no kernel is left for it on this device; {'; '.join(map(why, self._of(step)[:3]))}"

    def has(self, family: str) -> bool:
        """Return whether a schedule of the family is quarantined."""
        return any(isinstance(entry, QuarantinedSchedule) and entry.family == family for entry in self.entries)

    def _of(self, step: Sums) -> list[QuarantinedSchedule]:
        """Return the entries for the family of the step and for the type of its first operand."""
        of_step = family_of(step), step.operands[0].dtype.short
        found = (entry for entry in self.entries if isinstance(entry, QuarantinedSchedule))
        return [entry for entry in found if (entry.family, entry.type) == of_step]

    def refusal(self, operator: str, types: Collection[str]) -> str:
        """Return why no node of the operator that reads these element types may be claimed; "" if one may be."""
        found = (entry for entry in self.entries if isinstance(entry, QuarantinedOperator))
        return next((why(entry) for entry in found if entry.operator == operator and entry.type in types), "")


def family_of(step: Sums) -> str:
    """Return the family of a step with a schedule: "gemm", "convolution" or "attention"."""
    return "convolution" if isinstance(step, Convolve) else "attention" if isinstance(step, Attend) else "gemm"


def why(entry: Quarantined) -> str:
    """Return the reason for users why a node does not run by what is quarantined."""
    return f"{entry} is quarantined on this device by ort-cuda-plugin selftest: {entry.reason}"
