"""Look for what may be wrong with the installation, and say what to do about each finding.

The exit code is 0 where nothing is broken, and 1 where something is.
"""

from __future__ import annotations

import argparse
import json

from rich.text import Text

from ort_cuda_plugin.cli.common import output_console
from ort_cuda_plugin.cli.exit_codes import ExitCode
from ort_cuda_plugin.doctor.examine import examine
from ort_cuda_plugin.doctor.findings import Finding, Severity

_STYLES = {Severity.OK: "green", Severity.NOTE: "cyan", Severity.WARNING: "yellow", Severity.PROBLEM: "bold red"}


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
    console = output_console()
    for finding in found:
        severity = finding.severity
        text = Text.assemble((f"{severity.value:8}", _STYLES[severity]), f" {finding.subject}: {finding.text}")
        console.print(text, soft_wrap=True)
        if finding.advice:
            console.print(Text(f"{'':8} -> {finding.advice}"), soft_wrap=True)
