"""Examine the installation, and say what to do about each finding.

The exit code is 1 if anything is broken, else 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ort_cuda_plugin.abi.message_texts import printable
from ort_cuda_plugin.cli.exit_codes import ExitCode
from ort_cuda_plugin.cli.plain_text import styled
from ort_cuda_plugin.doctor.examine import examine
from ort_cuda_plugin.doctor.findings import Finding, Machine, Severity
from ort_cuda_plugin.doctor.report import finding_lines, report

_STYLES = {Severity.OK: "32", Severity.NOTE: "36", Severity.WARNING: "33", Severity.PROBLEM: "1;31"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    form.add_argument(
        "--fix",
        action="store_true",
        help="print only the shell commands that mend what was found, one per line; none is run. Findings without a"
        " command go to the standard error",
    )
    form.add_argument(
        "--report",
        metavar="FILE",
        help="also write a text file for an issue: the findings, versions, platform, CPU, devices and variables. User"
        " name, host name and paths of the user are replaced. With -, print this text instead of the table",
    )


def execute(arguments: argparse.Namespace) -> int:
    machine = Machine()
    found = list(examine(machine))
    if arguments.json:
        print(json.dumps([_plain(finding) for finding in found], indent=2))
    elif arguments.fix:
        _print_commands(found)
    elif arguments.report == "-":
        print(printable(report(machine, found)), end="")
    else:
        _print(found)
        if arguments.report is not None:
            Path(arguments.report).write_text(printable(report(machine, found)), encoding="utf-8")
    is_broken = any(finding.severity is Severity.PROBLEM for finding in found)
    return ExitCode.MISMATCH if is_broken else ExitCode.OK


def _plain(finding: Finding) -> dict[str, str | list[str]]:
    return {
        "subject": finding.subject,
        "severity": finding.severity.value,
        "text": finding.text,
        "advice": finding.advice,
        "commands": list(finding.commands),
    }


def _print(found: Sequence[Finding]) -> None:
    for finding in found:
        for number, line in enumerate(map(printable, finding_lines(finding))):
            print(line if number else f"{styled(line[:8], _STYLES[finding.severity])}{line[8:]}")


def _print_commands(found: Sequence[Finding]) -> None:
    """Print each command once. Leave out all commands of a finding if one of them has a control character.

    Warnings and problems whose commands are not printed go to the standard error.
    """
    printed: set[str] = set()
    for finding in found:
        if finding.commands and all(command.isprintable() for command in finding.commands):
            for command in finding.commands:
                if command not in printed:
                    print(command)
                printed.add(command)
        elif finding.severity in (Severity.WARNING, Severity.PROBLEM):
            print("no command mends this:", *map(printable, finding_lines(finding)), sep="\n", file=sys.stderr)
