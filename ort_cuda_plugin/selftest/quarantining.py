"""Decides what a selftest quarantines: schedules and operators whose checks failed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from ..program.steps.quarantine import Quarantined, QuarantinedOperator, QuarantinedSchedule
from .sections.case import Result, Verdict


def failures(results: Iterable[Result]) -> list[Result]:
    """Return the failed checks."""
    return [result for result in results if result.verdict is Verdict.FAIL]


def quarantined_by(results: Sequence[Result]) -> list[Quarantined]:
    """Return what failed.

    If a schedule of a model failed, it is the schedule that is quarantined: the rules prefer one of the model's
    schedules. If no other schedule did, the model's operators are.
    """
    found: dict[Quarantined, None] = {}
    for _, group in groupby(failures(results), lambda result: result.case):
        of_case = [*group]
        schedules = [result for result in of_case if result.engine]
        for result in schedules or of_case:
            found.update(dict.fromkeys(_entries(result)))
    return [*found, *(entry for entry in _engines(results) if entry not in found)]


def _entries(result: Result) -> Iterator[Quarantined]:
    reason = f"{result.name}: {result.reason}"
    if result.engine:
        yield QuarantinedSchedule(result.family, result.operand, result.engine, result.tile, reason)
        return
    for operator in result.operators:
        yield QuarantinedOperator(operator, result.type, reason)


def _engines(results: Sequence[Result]) -> Iterator[QuarantinedSchedule]:
    """Yield the engines with two failed tiles and none that passed: the mistake is not one of a tile."""
    tiles: dict[tuple[str, str, str], dict[str, Result]] = {}
    for result in results:
        if result.engine and result.tile and result.verdict is not Verdict.SKIPPED:
            of_engine = tiles.setdefault((result.family, result.operand, result.engine), {})
            if of_engine.get(result.tile, result).verdict is not Verdict.FAIL:
                of_engine[result.tile] = result
    for (family, operand, engine), found in tiles.items():
        wrong = failures(found.values())
        if len(wrong) == len(found) >= 2:
            reason = f"all {len(found)} tiles failed, {wrong[0].name}: {wrong[0].reason}"
            yield QuarantinedSchedule(family, operand, engine, "", reason)


def still_quarantined(before: Iterable[Quarantined], results: Sequence[Result]) -> list[Quarantined]:
    """Return the entries of an earlier selftest that no check of this one has lifted, by passing."""
    passed = [result for result in results if result.verdict is Verdict.PASS]
    schedules = {(result.family, result.operand, result.engine) for result in passed if result.engine}
    tiles = {(result.family, result.operand, result.engine, result.tile) for result in passed if result.engine}
    operators = {(operator, result.type) for result in passed for operator in result.operators}

    def is_lifted(entry: Quarantined) -> bool:
        if isinstance(entry, QuarantinedOperator):
            return (entry.operator, entry.type) in operators
        key = (entry.family, entry.type, entry.engine)
        return (*key, entry.tile) in tiles if entry.tile else key in schedules

    return [entry for entry in before if not is_lifted(entry)]
