"""The selftest: runs sections, quarantines what fails, and checks that sessions under the quarantine are right."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..ep.device import quarantined
from ..program.steps.quarantine import Quarantined, QuarantinedOperator
from .device import Device
from .quarantining import failures, quarantined_by, still_quarantined
from .runner import SectionReport
from .sections.case import Result, Verdict
from .worker import Request


class Runs(Protocol):
    """Runs checks on a device; see `Runner`."""

    device: dict[str, Any]

    def run(self, request: Request) -> SectionReport: ...


@dataclass
class Report:
    """The results of a selftest. ``unresolved`` are failed checks that quarantine nothing: there is no alternative."""

    device: dict[str, Any]
    is_quick: bool
    sections: list[SectionReport] = field(default_factory=list)
    quarantined: list[Quarantined] = field(default_factory=list)
    unresolved: list[Result] = field(default_factory=list)
    is_stored: bool = False
    seconds: float = 0.0

    @property
    def cpu_seconds(self) -> float:
        return sum(section.cpu_seconds for section in self.sections)

    @property
    def results(self) -> list[Result]:
        return [result for section in self.sections for result in section.results]

    @property
    def has_failed(self) -> bool:
        return any(section.ended for section in self.sections) or bool(failures(self.results))


def selftest(runner: Runs, names: Sequence[str], is_quick: bool, *, stores: bool = True) -> Report:
    """Run sections; with ``stores``, quarantine what fails, for later sessions."""
    begun = time.monotonic()
    report = Report(runner.device, is_quick)
    for name in names:
        report.sections.append(runner.run(Request(name, is_quick)))
    if stores:
        _quarantine(runner, report)
    report.seconds = time.monotonic() - begun
    return report


def lift(device: Device) -> list[Quarantined]:
    """Lift the quarantine of a device; return what was quarantined.

    Raises: RuntimeError: there is no such device, or the kernel cache cannot be written to.
    """
    identity = quarantined.identity_of(device.opened)
    entries = [*quarantined.load_by(identity).entries]
    if not quarantined.store(identity, []):
        raise RuntimeError("the kernel cache cannot be written to. Set ORT_CUDA_PLUGIN_CACHE_DIR to a folder of yours")
    return entries


def _quarantine(runner: Runs, report: Report) -> None:
    identity = report.device["identity"]
    before = quarantined.load_by(identity).entries
    found = quarantined_by(report.results)
    kept = _without(still_quarantined(before, report.results), found)
    if not (before or found):
        report.is_stored = True
        report.unresolved = [result for result in failures(report.results) if not result.is_refusal]
        return
    entries = [*found, *kept]
    report.is_stored = quarantined.store(identity, entries)
    for section in report.sections if found and report.is_stored else ():
        more = _without(_still_wrong(runner, section, report.is_quick), entries)
        if more:
            entries += dict.fromkeys(more)
            report.is_stored = quarantined.store(identity, entries)
    report.quarantined = entries
    report.unresolved = [result for result in failures(report.results) if not _is_resolved(result)]


def _still_wrong(runner: Runs, section: SectionReport, is_quick: bool) -> list[Quarantined]:
    """Repeat the failed cases under the quarantine, and return entries for all operators of cases that still fail."""
    cases = tuple(dict.fromkeys(result.case for result in failures(section.results)))
    if not cases:
        return []
    again = runner.run(Request(section.name, is_quick, only=cases, with_quarantine=True))
    wrong = {result.case: f"{result.name}: {result.reason}" for result in failures(again.results) if not result.engine}
    return [
        QuarantinedOperator(operator, result.type, wrong[result.case], result.case)
        for result in again.results
        if result.case in wrong
        for operator in result.operators
    ]


def _is_resolved(result: Result) -> bool:
    return bool(result.engine or result.operators or result.is_refusal)


def _without(entries: Iterable[Quarantined], others: Sequence[Quarantined]) -> list[Quarantined]:
    return [entry for entry in entries if entry not in others]


def counts(results: Iterable[Result]) -> dict[Verdict, int]:
    """Return how many checks have each verdict."""
    found = dict.fromkeys(Verdict, 0)
    for result in results:
        found[result.verdict] += 1
    return found
