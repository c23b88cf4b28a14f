"""Time a model, or a suite of models, on the plugin and on other providers that take turns in one process.

Results are first compared with the CPU provider's. Inputs and outputs stay on the device. Without a GPU the times are
those of the emulated device, and the times of a GPU are estimated (docs/estimates.md).
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from rich.console import Console
from rich.table import Table

from ort_cuda_plugin import gpus, models
from ort_cuda_plugin.benchmark import sides
from ort_cuda_plugin.benchmark.creation import measure_creation
from ort_cuda_plugin.benchmark.figures import HEADS, figures, notes, title
from ort_cuda_plugin.benchmark.measure import ModelReport, SideReport, Task, device_milliseconds, measure
from ort_cuda_plugin.benchmark.plot import svg
from ort_cuda_plugin.cli.common import (
    MODEL_HELP,
    add_operators_argument,
    counted,
    model_path,
    output_console,
    output_file,
    read_model,
    waiting,
    written_model,
)
from ort_cuda_plugin.cli.devices import add_device_argument, select_device
from ort_cuda_plugin.cli.exit_codes import ExitCode, UserError
from ort_cuda_plugin.cli.plain_text import json_text
from ort_cuda_plugin.cli.runs.run import add_input_arguments, load, with_hint
from ort_cuda_plugin.networks import DTYPES, NETWORKS, split_name

SUITE = "suite"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "models",
        metavar="MODEL",
        nargs="+",
        help=f"{MODEL_HELP}; '{SUITE}': all models of the onnx wheel, and all networks in all types",
    )
    add_device_argument(parser)
    add_operators_argument(parser)
    add_input_arguments(parser)
    parser.add_argument(
        "--against",
        action="append",
        choices=sides.SIDES[1:],
        help="another provider (repeatable); default: CUDAExecutionProvider with and without CUDA graphs if installed,"
        " else the CPU provider",
    )
    parser.add_argument("--batch", type=int, action="append", help="size of a dimension named batch (repeatable)")
    parser.add_argument(
        "--runs", type=int, default=50, metavar="N", help="number of timed Runs with each provider (default 50)"
    )
    parser.add_argument(
        "--warmup", type=int, default=5, metavar="N", help="number of warm-up Runs before the timed Runs (default 5)"
    )
    parser.add_argument(
        "--no-creation", action="store_true", help="do not time session creation, which runs in separate processes"
    )
    parser.add_argument(
        "--estimate",
        choices=gpus.names(),
        help="the GPU to estimate for (default: the device, or h100 on the emulated device)",
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all figures to this file (JSON)")
    parser.add_argument(
        "--html", type=output_file, metavar="FILE", help="write a web page with all figures to this file"
    )
    parser.add_argument(
        "--plot",
        type=output_file,
        metavar="FILE.svg",
        help="draw the speed of the plugin relative to the other providers in this file",
    )


def execute(arguments: argparse.Namespace) -> int:
    for option, least in (("runs", 1), ("warmup", 0), ("seed", 0)):
        if (number := getattr(arguments, option)) < least:
            raise UserError(ExitCode.USAGE, f"--{option} {number}: must be at least {least}")
    emulate = select_device(arguments.device)
    gpu = arguments.estimate or ("h100" if emulate else None)
    chosen = [sides.PLUGIN, *arguments.against] if arguments.against else sides.available(emulate)
    console, reports = Console(stderr=True), []
    named = suite() if arguments.models == [SUITE] else arguments.models
    for number, name in enumerate(named, 1):
        position = f"{number} of {len(named)}: " if len(named) > 1 else ""
        subject = Subject.read(name)
        if arguments.batch and not subject.has_batch and arguments.models != [SUITE]:
            raise UserError(
                ExitCode.USAGE, f"--batch: {name} has no dimension named batch. Use --dim for other dimensions"
            )
        for batch in (arguments.batch or [1]) if subject.has_batch else [None]:
            reports.append(_one(subject, batch, chosen, emulate, gpu, arguments, console, position))
            print_report(reports[-1], output_console())
    if len(reports) > 1:
        print_means(reports, output_console())
    if arguments.json:
        arguments.json.write_text(json_text([asdict(report) for report in reports]), encoding="utf-8")
    if arguments.html:
        from ort_cuda_plugin.benchmark.page import page

        arguments.html.write_text(page(reports, means(reports) if len(reports) > 1 else []), encoding="utf-8")
    if arguments.plot:
        arguments.plot.write_text(svg(reports), encoding="utf-8")
    return ExitCode.OK if all(report.is_right for report in reports) else ExitCode.MISMATCH


def suite() -> list[str]:
    """Return the models of the suite: the wheel's light models, and each network in each of its types."""
    return [*models.wheel_models(), *(f"{name}:{dtype}" for name in NETWORKS for dtype in DTYPES)]


@dataclass(frozen=True)
class Subject:
    """A model to measure, read once."""

    name: str
    path: Path
    model: onnx.ModelProto

    @staticmethod
    def read(name: str) -> Subject:
        """Read a model. Raises UserError if it does not exist, or is not an ONNX model."""
        path = model_path(name)
        return Subject(name, path, read_model(path, name))

    @property
    def has_batch(self) -> bool:
        """Whether an input has a dimension with the name "batch"."""
        dims = [dim for value in self.model.graph.input for dim in value.type.tensor_type.shape.dim]
        return any(dim.dim_param == "batch" for dim in dims)

    @property
    def dtype(self) -> str:
        """Return the element type of the computation, from a network's name, or from a file's operators and weights."""
        if (parts := split_name(self.name)) is not None:
            return parts[1]
        if any(node.op_type in ("QuantizeLinear", "DynamicQuantizeLinear") for node in self.model.graph.node):
            return "int8"
        halves = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
        floats = [x.data_type for x in self.model.graph.initializer if x.data_type in (onnx.TensorProto.FLOAT, *halves)]
        return "float16" if floats and max(floats, key=floats.count) in halves else "float32"


def _one(
    subject: Subject,
    batch: int | None,
    chosen: Sequence[str],
    emulate: bool,
    gpu: str | None,
    arguments: argparse.Namespace,
    console: Console,
    position: str,
) -> ModelReport:
    """Measure one model. ``batch`` is None if the model has no dimension with the name "batch".

    ``position`` is the text before the model's name in progress, such as "2 of 5: ".
    """
    name = subject.name
    given = argparse.Namespace(**vars(arguments) | {"model": name})
    given.dim = [*arguments.dim, *([f"batch={batch}"] if batch is not None and arguments.batch else [])]

    def progress(turns: Sequence[int]) -> Iterable[int]:
        return counted(turns, position + name, console)

    try:
        source, names, feeds = load(subject.path, given, subject.model)
        file = written_model(source, subject.path.stem) if isinstance(source, bytes) else subject.path
        first = next(iter(feeds.values()), np.zeros(1))
        size = first.shape[0] if first.ndim else 1
        operators = [str(path.resolve()) for path in arguments.operators or []]
        counts = arguments.runs, arguments.warmup
        task = Task(name, str(file), feeds, names, size, subject.dtype, emulate, *counts, operators)
        with waiting(console, f"{position}{name}: creating sessions"):
            report = measure(task, chosen, progress, () if arguments.against else chosen[1:])
        for side in report.sides:
            with waiting(console, f"{position}{name}: measuring {side} in separate sessions"):
                report.sides[side] = _completed(report.sides[side], task, side, not arguments.no_creation)
        if gpu is not None:
            shapes = {key: value.shape for key, value in feeds.items()}
            try:
                with waiting(console, f"{position}{name}: estimating for {gpu}"):
                    report.estimate = _estimate(file, gpu, shapes)
            except Exception as error:  # the measured times are worth showing without an estimate
                console.print(f"no estimate for {gpu}: {error}", markup=False, soft_wrap=True)
    except UserError:
        raise
    except sides.SideError as error:
        raise UserError(ExitCode.UNAVAILABLE, str(error)) from error
    except Exception as error:
        raise UserError(ExitCode.MODEL_FAILED, f"{name}: {with_hint(error, subject.path, given)}") from error
    return report


def _completed(side_report: SideReport, task: Task, side: str, with_creation: bool) -> SideReport:
    """Add the figures that are measured in separate sessions to a report: host share, creation, memory."""
    work = device_milliseconds(task, side) if side != sides.CPU else None
    share = None if work is None else max(0.0, 1 - work / side_report.p50)
    if not with_creation:
        return replace(side_report, host_share=share)
    made = measure_creation(task, side)
    held = None if side == sides.CPU else made.device_bytes
    return replace(side_report, host_share=share, cold_s=made.cold_s, warm_s=made.warm_s, device_bytes=held)


def _estimate(path: Path, gpu: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    from ort_cuda_plugin.cli.models.estimate import estimate_model, known_calibration
    from ort_cuda_plugin.gpus import accuracy

    found = estimate_model(path, gpus.gpu(gpu), shapes, {}, calibrated=known_calibration(gpus.gpu(gpu)))
    return {
        "device": found.label,
        "accuracy": accuracy.error_text(),
        "microseconds": found.seconds * 1e6,
        "range": f"{accuracy.range_text(accuracy.run_range(found.seconds), 0)} us",
        "roofline_microseconds": found.roofline * 1e6,
        "steps_roofline_microseconds": found.steps_roofline * 1e6,
        "dram_bytes": found.dram,
    }


def print_report(report: ModelReport, console: Console) -> None:
    table = Table("side", title=title(report), title_justify="left")
    for name in HEADS:
        table.add_column(name, justify="right")
    for side, found in report.sides.items():
        table.add_row(side, *figures(found))
    console.print(table)
    for line in notes(report):
        console.print(line, highlight=False)


def print_means(reports: Sequence[ModelReport], console: Console) -> None:
    """Print the plugin's speedup over every other side."""
    for line in means(reports):
        console.print(line)


def means(reports: Sequence[ModelReport]) -> list[str]:
    """Return a line with the plugin's speedup over every other side: the geometric mean over the models."""
    lines = []
    for side in dict.fromkeys(side for report in reports for side in report.sides if side != sides.PLUGIN):
        ratios = [report.sides[side].ratio for report in reports if side in report.sides]
        mean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
        lines.append(f"the plugin compared with {side}: {mean:.2f} times as fast (geometric mean of {len(ratios)})")
    return lines
