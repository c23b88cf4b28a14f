"""Run a model on the execution provider and compare it with ONNX Runtime's CPU provider.

In the onnx wheel's light models all elements of a weight are equal. The command replaces the weights by seeded noise,
and compares the input of the final Softmax, so that the comparison can fail.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import ort_cuda_plugin
from ort_cuda_plugin import models
from ort_cuda_plugin.benchmark import sides
from ort_cuda_plugin.cli.common import (
    add_model_arguments,
    check_types,
    counted,
    model_path,
    numpy_file,
    output_console,
    read_model,
    usual_sizes,
    waiting,
)
from ort_cuda_plugin.cli.devices import select_device
from ort_cuda_plugin.cli.exit_codes import ExitCode, UserError
from ort_cuda_plugin.cli.plain_text import json_text
from ort_cuda_plugin.comparison.differences import differences
from ort_cuda_plugin.ep.device.identity import is_our_name

TOLERANCE = 1e-3
_RUN_FAILED = "returned while running "
"""Part of ONNX Runtime's message about a node that fails in a Run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="timed Runs after the first Run (default 5)")
    add_input_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def add_input_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `load` needs."""
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="NAME=FILE.npy",
        help="values of one input; other inputs get random values",
    )
    parser.add_argument(
        "--dim",
        action="append",
        default=[],
        metavar="NAME=N",
        help="size of a symbolic dimension (default 1); INPUT.AXIS=N for one without a name",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random values (default 0)")


@dataclass
class RunReport:
    """Result of `measure`. Times are in seconds; `median_run` is None without timed Runs.

    `launches` and `library_calls` are averages of the timed Runs, rounded down. `graph_replays` is the total of the
    timed Runs, and `graph_fallbacks` counts by reason how often a cluster did not use a CUDA graph in them. `error` is
    max|a-b|/max|b| over the compared outputs, a of the plugin and b of the CPU provider. If the CPU provider cannot run
    the model, `error` and `cpu_run` are None and `not_compared` has the reason. `inputs` has the shape of each input.
    """

    model: str
    device: str
    emulated: bool
    inputs: dict[str, tuple[int, ...]]
    nodes: int
    nodes_on_ep: int
    launches: int
    library_calls: int
    graph_replays: int
    graph_fallbacks: dict[str, int]
    first_run: float
    median_run: float | None
    cpu_run: float | None
    compared: list[str]
    not_compared: str
    error: float | None
    tolerance: float
    kernels_compiled: int
    python_calls_in_steady_runs: int


def execute(arguments: argparse.Namespace) -> int:
    console = Console(stderr=True)
    path = model_path(arguments.model)
    for option in ("runs", "seed"):
        if (number := getattr(arguments, option)) < 0:
            raise UserError(ExitCode.USAGE, f"--{option} {number}: must not be negative")
    emulate = select_device(arguments.device)
    try:
        report = measure(path, emulate, arguments, console)
    except UserError:
        raise
    except Exception as error:
        raise UserError(ExitCode.MODEL_FAILED, f"{arguments.model}: {with_hint(error, path, arguments)}") from error
    if arguments.json:
        print(json_text(asdict(report)))
    else:
        print_table(report)
    return ExitCode.OK if report.error is None or report.error <= TOLERANCE else ExitCode.MISMATCH


def measure(path: Path, emulate: bool, arguments: argparse.Namespace, console: Console) -> RunReport:
    """Run the model on the plugin and on the CPU provider, and compare their outputs."""
    with waiting(console, f"loading {path.name}"):
        source, names, feeds = load(path, arguments)
    if not names:
        raise UserError(ExitCode.MODEL_FAILED, f"{arguments.model}: the model has no outputs, so nothing can be run")
    before = ort_cuda_plugin.counters()
    started = time.perf_counter()
    with waiting(console, "creating the session"):
        session = ort_cuda_plugin.session(source, emulate=emulate)
    with waiting(console, "first run"):
        actual = session.run(names, feeds)
    first_run = time.perf_counter() - started
    steady = ort_cuda_plugin.counters()
    times = []
    for _ in counted(range(arguments.runs), "runs", console):
        begun = time.perf_counter()
        session.run(names, feeds)
        times.append(time.perf_counter() - begun)
    after = ort_cuda_plugin.counters()
    largest: float | None = None
    cpu_run, why = None, ""
    with waiting(console, "comparing with the CPU provider"):
        try:
            cpu = sides.create_session(sides.CPU, source, emulate)
        except sides.LackingSideError as missing:
            why = str(missing)
        else:
            try:
                expected = cpu.run(names, feeds)
            except Exception as error:  # docs/differences.md lists models that only ONNX Runtime's CPU provider refuses
                text = f"CPUExecutionProvider, for the comparison: {with_hint(error, path, arguments)}"
                raise UserError(ExitCode.MODEL_FAILED, f"{arguments.model}: {text}") from error
            begun = time.perf_counter()
            cpu.run(names, feeds)
            cpu_run = time.perf_counter() - begun
            found = differences(names, actual, expected, {})
            largest = max((each.error for each in found), default=0.0)
    runs = max(1, arguments.runs)
    assignment = session.get_provider_graph_assignment_info()
    on_ep = sum(len(part.get_nodes()) for part in assignment if is_our_name(part.ep_name))
    return RunReport(
        model=path.stem,
        device=_device_name(emulate),
        emulated=emulate,
        inputs={name: np.shape(values) for name, values in feeds.items()},
        nodes=sum(len(part.get_nodes()) for part in assignment),
        nodes_on_ep=on_ep,
        launches=(after["launches"] - steady["launches"]) // runs,
        library_calls=(after["library_calls"] - steady["library_calls"]) // runs,
        graph_replays=after["graph_replays"] - steady["graph_replays"],
        graph_fallbacks=_fallbacks(steady, after),
        first_run=first_run,
        median_run=statistics.median(times) if times else None,
        cpu_run=cpu_run,
        compared=[] if why else names,
        not_compared=why,
        error=largest,
        tolerance=TOLERANCE,
        kernels_compiled=after["kernels_compiled"] - before["kernels_compiled"],
        python_calls_in_steady_runs=after["python_calls"] - steady["python_calls"],
    )


def load(
    path: Path, arguments: argparse.Namespace, model: onnx.ModelProto | None = None
) -> tuple[str | bytes, list[str], dict[str, NDArray[np.generic]]]:
    """Return the model for a session, the names of the outputs to compare, and the inputs.

    The model is its path, or bytes for a light model, which gets random weights. ``model`` is the parsed file; without
    it the function parses the file.

    Raises UserError if the file is not a model, or if values for its inputs cannot be made.
    """
    model = read_model(path, arguments.model) if model is None else model
    check_types(model)
    if not models.is_wheel_model(path):
        return str(path), [output.name for output in model.graph.output], _feeds(model, arguments)
    model, compared = models.before_softmax(model)
    model = models.with_noise_weights(model, arguments.seed)
    return model.SerializeToString(), [compared], _feeds(model, arguments)


def print_table(report: RunReport) -> None:
    table = Table(title=report.model, show_header=False, title_justify="left")
    median = "-" if report.median_run is None else f"{report.median_run * 1e3:.2f} ms"
    rows: list[tuple[str, Any]] = [
        ("device", report.device),
        ("inputs", _inputs(report)),
        ("nodes on the EP", f"{report.nodes_on_ep} of {report.nodes}"),
        ("launches per run", report.launches),
        ("library calls per run", report.library_calls),
        ("CUDA graph replays", _graphs(report)),
        ("session and first run", f"{report.first_run:.2f} s ({report.kernels_compiled} kernels compiled)"),
        ("run (median)", median),
    ]
    if report.cpu_run is not None:
        rows.append(("CPU provider", f"{report.cpu_run * 1e3:.2f} ms"))
    rows.append(("compared", report.not_compared or ", ".join(report.compared)))
    if report.error is not None:
        verdict = "ok" if report.error <= report.tolerance else "TOO LARGE"
        rows.append(("largest error", f"{report.error:.2e}, allowed {report.tolerance:.0e}: {verdict}"))
    for name, value in rows:
        table.add_row(name, str(value))
    output_console().print(table)


def _inputs(report: RunReport) -> str:
    """Return the inputs with their shapes, as "x 1x3x8x8, y scalar"."""
    return ", ".join(f"{name} {'x'.join(map(str, shape)) or 'scalar'}" for name, shape in report.inputs.items())


def _fallbacks(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    prefix = "graph_fallbacks_"
    found = {name.removeprefix(prefix): after[name] - before[name] for name in after if name.startswith(prefix)}
    return {reason: times for reason, times in found.items() if times}


def _graphs(report: RunReport) -> str:
    reasons = "".join(f", {times} not: {reason}" for reason, times in report.graph_fallbacks.items())
    return f"{report.graph_replays}{reasons}"


def _device_name(emulate: bool) -> str:
    return next(device.name for device in ort_cuda_plugin.devices() if device.emulated == emulate)


def _feeds(model: onnx.ModelProto, arguments: argparse.Namespace) -> dict[str, NDArray[np.generic]]:
    given = dict(_pair(text, "--input", "NAME=FILE.npy") for text in arguments.input)
    dims = dict(_pair(text, "--dim", "NAME=N") for text in arguments.dim)
    inputs = model.graph.input
    _name_dimensions(model)
    _check_names("--input", "input", given, {value.name for value in inputs})
    symbols = {dim.dim_param for value in inputs for dim in value.type.tensor_type.shape.dim if dim.dim_param}
    _check_names("--dim", "symbolic dimension", dims, symbols)
    sizes = usual_sizes(arguments.model) | {name: _size(name, size) for name, size in dims.items()}
    arrays = {name: _array(name, file) for name, file in given.items()}
    try:
        feeds = models.random_inputs(model, arguments.seed, sizes, skip=set(arrays))
    except ValueError as error:
        hint = "--input NAME=FILE.npy gives the values of an input, --dim NAME=N a size that the model does not fix"
        raise UserError(ExitCode.USAGE, f"{error}. {hint}") from error
    return {**feeds, **arrays}


def _name_dimensions(model: onnx.ModelProto) -> None:
    """Give each open dimension of an input that has no name the name INPUT.AXIS."""
    for value in model.graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if not dim.HasField("dim_value") and not dim.dim_param:
                dim.dim_param = f"{value.name}.{axis}"


def with_hint(error: Exception, path: Path, arguments: argparse.Namespace) -> str:
    """Return the text of an error. After a failed Run, suggest to give sizes and integers instead of the defaults."""
    text = str(error).rstrip(".")
    if _RUN_FAILED not in text:
        return text
    sizes, inputs = _guesses(path, arguments)
    if sizes:
        text += f". Sizes that the model does not fix had defaults: try {' '.join(f'--dim {name}=N' for name in sizes)}"
    if inputs:
        text += (
            f". Integer inputs had random values, 0 or 1: try {' '.join(f'--input {name}=FILE.npy' for name in inputs)}"
        )
    return text


def _guesses(path: Path, arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return the symbolic dimensions and the integer inputs for which the user gave no value."""
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception:  # the caller reports that the model cannot be read
        return [], []
    stated = {text.partition("=")[0] for text in (*arguments.dim, *arguments.input)}
    _name_dimensions(model)
    constants = {tensor.name for tensor in model.graph.initializer}
    free = [value for value in model.graph.input if value.name not in constants | stated]
    dims = [dim for value in free for dim in value.type.tensor_type.shape.dim]
    sizes = [dim.dim_param for dim in dims if not dim.HasField("dim_value") and dim.dim_param not in stated]
    integers = (onnx.TensorProto.INT32, onnx.TensorProto.INT64)
    return list(dict.fromkeys(sizes)), [x.name for x in free if x.type.tensor_type.elem_type in integers]


def _check_names(option: str, what: str, given: Iterable[str], known: set[str]) -> None:
    for name in given:
        if name not in known:
            has = ", ".join(sorted(known)) or "none"
            raise UserError(ExitCode.USAGE, f"{option} {name}: the model has no {what} {name!r}. Its {what}s: {has}")


def _size(name: str, text: str) -> int:
    if not text.isdecimal():
        raise UserError(ExitCode.USAGE, f"--dim {name}={text}: expected a size, a whole number of at least 0")
    return int(text)


def _array(name: str, file: str) -> NDArray[np.generic]:
    loaded = numpy_file(f"--input {name}={file}", Path(file))
    if not isinstance(loaded, np.ndarray):
        raise UserError(
            ExitCode.USAGE, f"--input {name}={file}: expected an array of numbers or str that numpy.save wrote"
        )
    return loaded


def _pair(text: str, option: str, form: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name or not value:
        raise UserError(ExitCode.USAGE, f"{option} {text}: expected the form {form}")
    return name, value
