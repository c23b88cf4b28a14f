"""Decides what a selftest quarantines: schedules and operators whose checks failed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby

from ..program.steps.quarantine import Quarantined, QuarantinedOperator, QuarantinedSchedule
from ..program.steps.schedule import Engine
from .sections.case import Result, Verdict


def failures(results: Iterable[Result]) -> list[Result]:
    """Return the failed checks."""
    return [result for result in results if result.verdict is Verdict.FAIL]


def quarantined_by(results: Sequence[Result]) -> list[Quarantined]:
    """Return what to quarantine because its checks failed.

    If forced schedules of a model failed, these schedules are quarantined: a failure with the rules' choice is then
    that of one of them. If only the run with the rules' choice failed, the model's operators are quarantined.
    """
    found: dict[Quarantined, None] = {}
    right = _right_epilogues(results)
    for _, group in groupby(failures(results), lambda result: result.case):
        of_case = [*group]
        schedules = [result for result in of_case if result.engine]
        for result in schedules or of_case:
            found.update(dict.fromkeys(_entries(result, right.get(_kind(result), set()))))
    return [*found, *(entry for entry in _engines(results) if entry not in found)]


def _kind(result: Result) -> tuple[str, str, str]:
    return result.family, result.operand, result.engine


def _right_epilogues(results: Sequence[Result]) -> dict[tuple[str, str, str], set[str]]:
    """Return the epilogues with which a library's calls were right in each check, by kind of call.

    A kind whose calls without an epilogue were wrong has no entry: calls with an epilogue compute the same product.
    """
    of_library = [result for result in results if result.engine == Engine.LIBRARY.value]
    wrong = {(_kind(result), result.epilogue) for result in failures(of_library)}
    right: dict[tuple[str, str, str], set[str]] = {}
    for result in of_library:
        kind = _kind(result)
        if result.verdict is Verdict.PASS and wrong.isdisjoint({(kind, "none"), (kind, result.epilogue)}):
            right.setdefault(kind, set()).add(result.epilogue)
    return right


def _entries(result: Result, right: Collection[str]) -> Iterator[Quarantined]:
    """Yield what a failed check quarantines.

    ``right`` are the epilogues with which library calls of the same kind are right. If there are any, only the failed
    epilogue is quarantined, else every epilogue.
    """
    reason = f"{result.name}: {result.reason}"
    if result.engine:
        epilogue = result.epilogue if right else ""
        yield QuarantinedSchedule(
            result.family, result.operand, result.engine, result.tile, reason, result.case, epilogue
        )
        return
    for operator in result.operators:
        yield QuarantinedOperator(operator, result.type, reason, result.case)


def _engines(results: Sequence[Result]) -> Iterator[QuarantinedSchedule]:
    """Yield the engines with at least two checked tiles if all tiles failed: the engine is wrong, not one tile."""
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
            yield QuarantinedSchedule(family, operand, engine, "", reason, wrong[0].case)


def still_quarantined(before: Iterable[Quarantined], results: Sequence[Result]) -> list[Quarantined]:
    """Return the entries of an earlier selftest whose cases have not passed in this one."""
    wrong = {result.case for result in failures(results)}
    passed = {result.case for result in results if result.verdict is Verdict.PASS} - wrong
    return [entry for entry in before if entry.case not in passed]
