"""Compile kernels for GPU architectures, without a GPU, and report registers, shared memory and spills.

The kernels are those in the manifest that a run of the test suite records, or a fixed sample of common operators.
Compiled kernels stay in the kernel cache, so an interrupted command continues where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ort_cuda_plugin.cli.common import is_silent, output_console
from ort_cuda_plugin.cli.exit_codes import ExitCode, UserError
from ort_cuda_plugin.compiler.library.kernel_library import MANIFEST_VARIABLE, read_manifest

DEFAULT_MANIFEST = Path(__file__).resolve().parents[3] / "build" / "kernels.jsonl"
"""Manifest that the tests of a source tree record. It contains source code of kernels that will be executed, so a
manifest in the working folder is not used by default.
"""
PROGRESS_SECONDS = 30
"""Seconds between lines of progress if the output is not a terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kernels = parser.add_mutually_exclusive_group()
    kernels.add_argument(
        "--sample", action="store_true", help="compile a fixed sample of kernels instead of those of a manifest"
    )
    kernels.add_argument(
        "--manifest",
        metavar="FILE",
        type=Path,
        help=f"compile the kernels of this file, which a test run recorded (default ${MANIFEST_VARIABLE}, else"
        " build/kernels.jsonl of a source tree, else the sample)",
    )
    parser.add_argument(
        "--arch", action="append", metavar="SM", help="compile for this architecture only, such as sm_90 (repeatable)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")


def _default_manifest() -> Path | None:
    if configured := os.environ.get(MANIFEST_VARIABLE):
        return Path(configured)
    return DEFAULT_MANIFEST if DEFAULT_MANIFEST.exists() else None


def execute(arguments: argparse.Namespace) -> int:
    from ort_cuda_plugin.cli.models.kernel_report import ARCHITECTURES, is_for_gpus, report, sample_specs
    from ort_cuda_plugin.compiler.compile import KernelCompileError

    known = {target.arch: target for target in ARCHITECTURES}
    unknown = [name for name in arguments.arch or () if name not in known]
    if unknown:
        raise UserError(ExitCode.USAGE, f"--arch {unknown[0]}: unknown architecture. Choose from {', '.join(known)}")
    targets = [known[name] for name in arguments.arch] if arguments.arch else list(known.values())
    manifest = None if arguments.sample else arguments.manifest or _default_manifest()
    try:
        specs = sample_specs() if manifest is None else list(filter(is_for_gpus, read_manifest(manifest)))
    except (OSError, ValueError) as error:
        message = (
            f"--manifest: the list of kernels {manifest} cannot be read ({error}). Run pytest, which records one, or "
            "use --sample"
        )
        raise UserError(ExitCode.USAGE, message) from error
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=is_silent() or not console.is_terminal) as progress:
        task = progress.add_task("compiling", total=len(specs) * len(targets))
        shown = time.monotonic()

        def advance(done: int) -> None:
            nonlocal shown
            progress.advance(task, done)
            if not console.is_terminal and time.monotonic() - shown >= PROGRESS_SECONDS:
                shown = time.monotonic()
                console.print(f"{progress.tasks[0].completed:.0f} of {len(specs) * len(targets)} compiled")

        try:
            usages = report(specs, targets, progress=advance)
        except (KernelCompileError, ValueError) as error:
            raise UserError(ExitCode.MODEL_FAILED, str(error)) from error
    failures = [usage for usage in usages if usage.is_failure]
    if arguments.json:
        print(json.dumps([asdict(usage) for usage in usages], indent=2))
    else:
        table = Table("kernel", "architecture", "registers", "shared", "stack", "spilled", "why spills are accepted")
        for usage in usages:
            numbers = (usage.registers, usage.static_shared, usage.stack, usage.spill_stores + usage.spill_loads)
            table.add_row(usage.kernel, usage.arch, *map(str, numbers), usage.reason)
        output_console().print(table)
        print(
            f"{len(specs)} kernels, {len(targets)} architectures, {len(failures)} with register spills that are not "
            "accepted"
        )
    return ExitCode.MISMATCH if failures else ExitCode.OK
