"""The report of a selftest as JSON data, and as a table of less than a page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .device import reference_of
from .quarantining import failures
from .sections.case import Verdict
from .selftest import Report, counts

VERSION = 1
"""Version of the JSON report; docs/selftest.md describes its fields."""
MAX_LINES = 12
"""Maximum number of failed checks, and of quarantined entries, in the table."""


def json_report(report: Report) -> dict[str, Any]:
    """Return the report as JSON data."""
    return {
        "version": VERSION,
        "device": report.device,
        "mode": "quick" if report.is_quick else "full",
        "reference": reference_of(report.device["emulated"]),
        "passed": not report.has_failed,
        "seconds": round(report.seconds, 2),
        "cpu_seconds": round(report.cpu_seconds, 2),
        "counts": _counts(report.results),
        "sections": [
            {
                "name": section.name,
                "seconds": round(section.seconds, 2),
                "ended": section.ended,
                "counts": _counts(section.results),
                "checks": [
                    {
                        "name": result.name,
                        "result": result.verdict.value,
                        "type": result.type,
                        "schedule": result.schedule,
                        "reason": result.reason,
                        "seconds": round(result.seconds, 4),
                    }
                    for result in section.results
                ],
            }
            for section in report.sections
        ],
        "quarantined": [{"what": str(entry), "reason": entry.reason} for entry in report.quarantined],
        "quarantine_stored": report.is_stored,
        "unresolved": [result.name for result in report.unresolved],
    }


def _counts(results: Any) -> dict[str, int]:
    return {verdict.value: count for verdict, count in counts(results).items()}


def table(report: Report) -> Iterator[str]:
    """Yield the lines of the table."""
    device = report.device
    libraries = ", ".join(f"{name} {version}" for name, version in device["libraries"].items()) or "no libraries"
    yield (
        f"{device['name']}, compute capability {device['compute_capability']}, driver {device['driver']}, {libraries}, "
        f"compared with the {reference_of(device['emulated'])}"
    )
    yield f"{'section':16} {'pass':>6} {'FAIL':>6} {'skipped':>8} {'seconds':>8}"
    for section in report.sections:
        found = counts(section.results)
        numbers = f"{found[Verdict.PASS]:6} {found[Verdict.FAIL]:6} {found[Verdict.SKIPPED]:8} {section.seconds:8.1f}"
        yield f"{section.name:16} {numbers}{f'  {section.ended}' if section.ended else ''}"
    wrong = [f"FAIL {result.name}: {result.reason}" for result in failures(report.results)]
    yield from _first(wrong, "failed checks")
    yield from _first([f"quarantined: {entry}" for entry in report.quarantined], "quarantined")
    yield from _first(
        [f"not quarantined, because the plugin has no alternative: {result.name}" for result in report.unresolved],
        "such checks",
    )
    if report.quarantined:
        yield (
            "Later sessions do not use the quarantined kernels and operators."
            if report.is_stored
            else "The kernel cache cannot be written to: nothing is quarantined. Set ORT_CUDA_PLUGIN_CACHE_DIR to a "
            "writable folder, and run the selftest again."
        )
    total = counts(report.results)
    yield (
        f"{total[Verdict.PASS]} checks passed, {total[Verdict.FAIL]} failed, {total[Verdict.SKIPPED]} skipped in "
        f"{report.seconds:.0f} s ({report.cpu_seconds:.0f} s of CPU time)"
    )


def _first(lines: list[str], what: str) -> Iterator[str]:
    yield from lines[:MAX_LINES]
    if len(lines) > MAX_LINES:
        yield f"... and {len(lines) - MAX_LINES} more {what}; --json FILE has them"
