"""Quarantine: the schedules and operators that failed the selftest on a device, so that plans avoid them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from .schedule import Engine, Schedule
from .steps import Attend, Convolve, Sums


class ScheduleKind(NamedTuple):
    """The properties of a schedule by which an entry of the quarantine selects schedules.

    ``type`` is the short name of the first operand's type when the schedule was chosen, such as "f16". A library's
    calls have the engine "library" and no tile; ``epilogue`` is the part of the epilogue that the call computes, such
    as "bias, ReLU".
    """

    family: str
    type: str
    engine: str
    tile: str
    epilogue: str = ""


@dataclass(frozen=True)
class QuarantinedSchedule:
    """A set of quarantined schedules, with the fields of a `ScheduleKind`; ``case`` is the selftest's failed check.

    ``tile`` is "" if the schedules with every tile are quarantined, ``epilogue`` if library calls with every epilogue.
    """

    family: str
    type: str
    engine: str
    tile: str
    reason: str = field(default="", compare=False)
    case: str = field(default="", compare=False)
    epilogue: str = ""

    def covers(self, kind: ScheduleKind) -> bool:
        """Return whether this entry forbids schedules of ``kind``."""
        is_equal = (self.family, self.type, self.engine) == kind[:3]
        return is_equal and self.tile in ("", kind.tile) and self.epilogue in ("", kind.epilogue)

    @property
    def schedule(self) -> str:
        """Return the schedule as text, as "mma 64x64x32", or as "library with epilogue bias, ReLU"."""
        return f"{self.engine} {self.tile}".strip() + (f" with epilogue {self.epilogue}" if self.epilogue else "")

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

    @property
    def names_epilogues(self) -> bool:
        """Return whether `allows` needs the epilogue of a library call."""
        return any(entry.epilogue for entry in self.schedules)

    def allows(self, step: Sums, schedule: Schedule, epilogue: str = "") -> bool:
        """Return whether the step may have the schedule; ``epilogue`` is that of a library call."""
        return not self.entries or not self.covering(kinds_for(step, schedule, epilogue))

    def covering(self, kinds: Iterable[ScheduleKind]) -> list[QuarantinedSchedule]:
        """Return the entries that cover a schedule of ``kinds``."""
        known = [*kinds]
        return [entry for entry in self.schedules if any(map(entry.covers, known))]

    @property
    def schedules(self) -> list[QuarantinedSchedule]:
        return [entry for entry in self.entries if isinstance(entry, QuarantinedSchedule)]

    @property
    def operators(self) -> list[QuarantinedOperator]:
        return [entry for entry in self.entries if isinstance(entry, QuarantinedOperator)]

    def note(self, step: Sums, epilogue: str = "") -> str:
        """Return text with the step's quarantined schedules, to append to the reason for its schedule; "" for none."""
        names = [entry.schedule for entry in self._of(step) if entry.epilogue in ("", epilogue)]
        return f"; not used, since ort-cuda-plugin selftest failed: {', '.join(names)}" if names else ""

    def why_none(self, step: Sums) -> str:
        """Return the reason why no schedule is left for the step, as text for users."""
        return f"no kernel is left for the node on this device; {'; '.join(map(why, self._of(step)[:3]))}"

    def has(self, family: str) -> bool:
        """Return whether a schedule of the family is quarantined."""
        return any(entry.family == family for entry in self.schedules)

    def _of(self, step: Sums) -> list[QuarantinedSchedule]:
        """Return the entries for the step's family and the type of its first operand."""
        of_step = family_of(step), step.operands[0].dtype.short
        return [entry for entry in self.schedules if (entry.family, entry.type) == of_step]

    def refusal(self, operator: str, types: Collection[str]) -> str:
        """Return why nodes of the operator that read one of ``types`` must not be claimed; "": they may be claimed."""
        found = (entry for entry in self.operators if entry.operator == operator and entry.type in types)
        return next(map(why, found), "")


def family_of(step: Sums) -> str:
    """Return the family of a step with a schedule: "gemm", "convolution" or "attention"."""
    return "convolution" if isinstance(step, Convolve) else "attention" if isinstance(step, Attend) else "gemm"


def operator_name(domain: str, op_type: str) -> str:
    """Return the name of an operator in a quarantine, as "Softmax" or "com.microsoft::FastGelu"."""
    return f"{domain}::{op_type}" if domain else op_type


def kinds_for(step: Sums, schedule: Schedule, epilogue: str = "") -> list[ScheduleKind]:
    """Return the kinds of a schedule for the step; ``epilogue``: that of a library call."""
    return schedule_kinds(family_of(step), step.operands[0].dtype.short, schedule, epilogue)


def schedule_kinds(family: str, type_name: str, schedule: Schedule, epilogue: str = "") -> list[ScheduleKind]:
    """Return the kinds of a schedule for a step of the family whose first operand has this type.

    A schedule has one kind for each of the launches between which a Run selects, such as a GEMM and a GEMV.
    """
    tile = "" if schedule.tile is None else schedule.tile.name
    kinds = [ScheduleKind(family, type_name, schedule.engine.value, tile, epilogue)]
    kinds += [ScheduleKind(family, type_name, Engine.GEMV.value, "")] if schedule.gemv_rows else []
    return kinds + ([ScheduleKind(family, type_name, Engine.IM2COL.value, "")] if schedule.im2col_pixels else [])


def why(entry: Quarantined) -> str:
    """Return the reason why a node cannot run because of ``entry``, as text for users."""
    return f"{entry} is not used on this device because it failed ort-cuda-plugin selftest: {entry.reason}"
