"""Run ONNX's backend tests on the emulated device, and print one verdict for each test.

ONNX Runtime's optimizations are off by default, so that the provider sees every node of a test.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from dataclasses import asdict, replace

from rich.console import Console
from rich.progress import Progress

from ort_cuda_plugin.cli.common import output_file
from ort_cuda_plugin.cli.devices import add_device_argument, find_device
from ort_cuda_plugin.cli.exit_codes import ExitCode, UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "patterns", nargs="*", metavar="TEST", help="run only tests whose KIND/NAME matches, such as 'node/conv*'"
    )
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="number of worker processes"
    )
    add_device_argument(parser, default="emulated")
    parser.add_argument(
        "--optimized", action="store_true", help="run the tests with ONNX Runtime's graph optimizations"
    )
    # The option's former name.
    parser.add_argument("--optimised", action="store_true", dest="optimized", help=argparse.SUPPRESS)
    parser.add_argument(
        "--check",
        action="store_true",
        help="run the tests in the emulated device's checking mode; a test with a finding fails",
    )
    parser.add_argument(
        "--single-nodes", action="store_true", help="run each node as a separate kernel, without fusion"
    )
    parser.add_argument(
        "--lowering",
        default="",
        metavar="GPU",
        help="run the kernels that the plugin generates for a GPU: sm_90, sm_90:132, or sm_90:ptx to execute their PTX",
    )
    parser.add_argument(
        "--adversarial",
        type=int,
        metavar="SEED",
        help="run with streams that defer and interleave work; the seed of each test is derived from SEED",
    )
    parser.add_argument(
        "--write",
        type=output_file,
        metavar="FILE",
        help="run all tests, with and without --optimized, and write the report (Markdown) to this file",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list of all outcomes")


def execute(arguments: argparse.Namespace) -> int:
    from ort_cuda_plugin.conformance.cases import matching_cases
    from ort_cuda_plugin.conformance.mode import Mode
    from ort_cuda_plugin.conformance.report import render
    from ort_cuda_plugin.conformance.runner import run
    from ort_cuda_plugin.conformance.verdict import BAD, Outcome, Verdict
    from ort_cuda_plugin.ep.device.devices import lowering_gpu

    console = Console(stderr=True)
    try:
        if arguments.lowering:
            lowering_gpu(arguments.lowering)
    except ValueError as error:
        raise UserError(ExitCode.USAGE, f"--lowering: {error}") from None
    patterns = arguments.patterns or ["*"]
    emulate = find_device(arguments.device)
    if not emulate and (arguments.check or arguments.lowering or arguments.adversarial is not None):
        raise UserError(
            ExitCode.USAGE, "--check, --adversarial and --lowering need the emulated device. Leave out --device"
        )
    mode = Mode(
        arguments.optimized,
        arguments.check,
        arguments.adversarial,
        arguments.single_nodes,
        arguments.lowering,
        emulate,
    )
    if arguments.write and (arguments.patterns or mode != Mode()):
        raise UserError(
            ExitCode.USAGE,
            "--write runs all tests on the emulated device, with and without --optimized. Leave out names of tests, "
            "--optimized, --check, --single-nodes, --lowering, --adversarial and --device",
        )
    if arguments.jobs < 1:
        raise UserError(ExitCode.USAGE, f"--jobs {arguments.jobs}: must be at least 1")
    if arguments.adversarial is not None and not 0 <= arguments.adversarial < 2**32:
        raise UserError(ExitCode.USAGE, f"--adversarial {arguments.adversarial}: expected a seed from 0 to {2**32 - 1}")
    cases = matching_cases(patterns)
    if not cases:
        raise UserError(
            ExitCode.USAGE, f"no test matches {' '.join(patterns)}. Names have the form KIND/NAME, such as 'node/conv*'"
        )

    def measured(mode: Mode) -> list[Outcome]:
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("tests", total=len(cases))
            return run(cases, mode, jobs=arguments.jobs, progress=lambda _: progress.advance(task))

    started = time.perf_counter()
    outcomes = measured(mode)
    seconds = time.perf_counter() - started
    if arguments.write:
        arguments.write.write_text(render(outcomes, measured(replace(mode, optimized=True))), encoding="utf-8")
    if arguments.json:
        print(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    else:
        for outcome in outcomes:
            if outcome.verdict is not Verdict.ON_EP:
                print(f"{outcome.key}: {outcome.verdict}: {outcome.group}: {outcome.reason}")
        for verdict, count in Counter(outcome.verdict for outcome in outcomes).most_common():
            print(f"{count:5d} {verdict}", file=sys.stderr)
        print(f"{len(outcomes)} tests in {seconds:.0f} s", file=sys.stderr)
    return ExitCode.MISMATCH if any(outcome.verdict in BAD for outcome in outcomes) else ExitCode.OK
