"""Run a model and list what the device did in a run: each kernel, library call and copy, its time, its ONNX nodes.

The times are those of ONNX Runtime's profile (docs/profiling.md), as medians over the runs after the first ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import ort_cuda_plugin
from ort_cuda_plugin.cli.common import (
    add_model_arguments,
    model_path,
    output_console,
    output_file,
    select_device,
    waiting,
)
from ort_cuda_plugin.cli.exit_codes import ExitCode, UserError
from ort_cuda_plugin.cli.run import add_input_arguments, load

_WARM_RUNS = 4
"""So many come first: kernels are compiled, and graphs are made."""


@dataclass(frozen=True)
class Work:
    """One piece of work of a run; ``microseconds`` is the median, ``share`` that of all work."""

    name: str
    kind: str
    nodes: list[str]
    op_types: list[str]
    microseconds: float
    share: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="runs that count (default 5)")
    add_input_arguments(parser)
    parser.add_argument("--trace", type=output_file, metavar="FILE", help="keep ONNX Runtime's profile there")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def execute(arguments: argparse.Namespace) -> int:
    path = model_path(arguments.model)
    if arguments.runs < 1:
        raise UserError(ExitCode.USAGE, f"--runs {arguments.runs}: must be at least 1")
    emulate = select_device(arguments.device)
    try:
        work = measure(path, emulate, arguments)
    except UserError:
        raise
    except Exception as error:
        raise UserError(ExitCode.MODEL_FAILED, f"{arguments.model}: {error}") from error
    if not work:
        raise UserError(ExitCode.UNAVAILABLE, "the profile has nothing of the device: the log says why")
    if arguments.json:
        print(json.dumps({"model": path.stem, "work": [asdict(each) for each in work]}, indent=2))
    else:
        print_table(path.stem, work)
    return ExitCode.OK


def measure(path: Path, emulate: bool, arguments: argparse.Namespace) -> list[Work]:
    """Runs the model, and gives the work of a run in its order."""
    import onnxruntime as ort

    with tempfile.TemporaryDirectory() as folder, waiting(Console(stderr=True), f"running {path.name}"):
        source, names, feeds = load(path, arguments)
        options = ort.SessionOptions()
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        session = ort_cuda_plugin.session(source, emulate=emulate, sess_options=options)
        for _ in range(_WARM_RUNS + arguments.runs):
            session.run(names, feeds)
        text = Path(session.end_profiling()).read_text()
    if arguments.trace is not None:
        arguments.trace.write_text(text)
    return work_of_a_run(json.loads(text), arguments.runs)


def work_of_a_run(events: list[dict[str, Any]], runs: int) -> list[Work]:
    """What the last ``runs`` runs did alike."""
    starts = sorted(event["ts"] for event in events if event["name"] == "model_run")[-runs:]
    ends = [*starts[1:], float("inf")]
    device = sorted((e for e in events if "ort_event_id" in e.get("args", {})), key=lambda e: e["ts"])
    by_run = [[e for e in device if start <= e["ts"] < end] for start, end in zip(starts, ends, strict=True)]
    length = statistics.mode(len(run) for run in by_run) if by_run else 0
    steps = list(zip(*(run for run in by_run if len(run) == length), strict=True))
    times = [statistics.median(int(e["args"]["duration_ns"]) / 1000 for e in step) for step in steps]
    total = sum(times) or 1.0
    return [
        Work(
            step[0]["name"],
            step[0]["args"]["kind"],
            step[0]["args"]["nodes"],
            step[0]["args"]["op_types"],
            time,
            time / total,
        )
        for step, time in zip(steps, times, strict=True)
    ]


def print_table(model: str, work: list[Work]) -> None:
    total = sum(each.microseconds for each in work)
    table = Table(title=f"{model}: {total:.0f} us of work on the device in a run", title_justify="left")
    table.add_column("us", justify="right")
    table.add_column("share", justify="right")
    table.add_column("work")
    table.add_column("nodes")
    for each in work:
        nodes = ", ".join(f"{name} ({op_type})" for name, op_type in zip(each.nodes, each.op_types, strict=True))
        table.add_row(f"{each.microseconds:.1f}", f"{each.share:.0%}", each.name, nodes or "-")
    output_console().print(table)
