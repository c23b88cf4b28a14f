"""Examine the installation, and say what to do about each finding.

The exit code is 1 if anything is broken, else 0.
"""

from __future__ import annotations

import argparse
import json

from ort_cuda_plugin.cli.exit_codes import ExitCode, printable
from ort_cuda_plugin.cli.plain_text import styled
from ort_cuda_plugin.doctor.examine import examine
from ort_cuda_plugin.doctor.findings import Finding, Severity

_STYLES = {Severity.OK: "32", Severity.NOTE: "36", Severity.WARNING: "33", Severity.PROBLEM: "1;31"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")


def execute(arguments: argparse.Namespace) -> int:
    found = list(examine())
    if arguments.json:
        print(json.dumps([_plain(finding) for finding in found], indent=2))
    else:
        _print(found)
    is_broken = any(finding.severity is Severity.PROBLEM for finding in found)
    return ExitCode.MISMATCH if is_broken else ExitCode.OK


def _plain(finding: Finding) -> dict[str, str]:
    return {
        "subject": finding.subject,
        "severity": finding.severity.value,
        "text": finding.text,
        "advice": finding.advice,
    }


def _print(found: list[Finding]) -> None:
    for finding in found:
        severity = finding.severity
        print(f"{styled(f'{severity.value:8}', _STYLES[severity])} {printable(finding.subject + ': ' + finding.text)}")
        if finding.advice:
            print(f"{'':8} -> {printable(finding.advice)}")
