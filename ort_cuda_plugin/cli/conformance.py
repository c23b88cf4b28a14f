"""Run ONNX's backend tests on the emulated device and give each one verdict.

Without ONNX Runtime's optimisations by default, so that nothing is folded away before the provider sees it.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from ort_cuda_plugin.cli.exit_codes import ExitCode, UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "patterns", nargs="*", metavar="TEST", help="only tests whose KIND/NAME matches, e.g. 'node/conv*'"
    )
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="worker processes")
    parser.add_argument("--optimised", action="store_true", help="with ONNX Runtime's graph optimisations")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="run all tests both ways and write the report (Markdown)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list of all outcomes")


def execute(arguments: argparse.Namespace) -> int:
    from ort_cuda_plugin.conformance.cases import load_cases
    from ort_cuda_plugin.conformance.report import render
    from ort_cuda_plugin.conformance.runner import run
    from ort_cuda_plugin.conformance.verdict import Outcome, Verdict

    console = Console(stderr=True)
    patterns = arguments.patterns or ["*"]
    keys = [key for key in load_cases() if any(fnmatch.fnmatch(key, pattern) for pattern in patterns)]
    if not keys:
        raise UserError(ExitCode.USAGE, f"no test matches {' '.join(patterns)}")

    def measured(optimised: bool) -> list[Outcome]:
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("tests", total=len(keys))
            return run(keys, optimised=optimised, jobs=arguments.jobs, progress=lambda _: progress.advance(task))

    started = time.perf_counter()
    outcomes = measured(arguments.optimised)
    seconds = time.perf_counter() - started
    if arguments.write:
        arguments.write.write_text(render(outcomes, measured(not arguments.optimised)))
    if arguments.json:
        print(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    else:
        for outcome in outcomes:
            if outcome.verdict is not Verdict.ON_EP:
                print(f"{outcome.key}: {outcome.verdict}: {outcome.reason}")
        for verdict, count in Counter(outcome.verdict for outcome in outcomes).most_common():
            print(f"{count:5d} {verdict}", file=sys.stderr)
        print(f"{len(outcomes)} tests in {seconds:.0f} s", file=sys.stderr)
    bad = [outcome for outcome in outcomes if outcome.verdict in (Verdict.WRONG, Verdict.FAILED)]
    return ExitCode.MISMATCH if bad else ExitCode.OK
