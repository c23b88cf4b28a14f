"""Estimate the time of a Run of a model on a GPU, step by step; no GPU is needed.

The model is compiled to a plan for the GPU with its libraries, and a cost model predicts the time of each step.
docs/estimates.md describes the limits of the estimates.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import onnx
from rich.console import Console
from rich.table import Table

from ort_cuda_plugin import gpus
from ort_cuda_plugin.cli.common import (
    MODEL_HELP,
    add_operators_argument,
    model_path,
    named_values,
    number,
    output_console,
    output_file,
    shape,
    waiting,
)
from ort_cuda_plugin.cli.devices import unavailable_as_user_error
from ort_cuda_plugin.cli.exit_codes import ExitCode, UserError
from ort_cuda_plugin.cli.plain_text import json_text
from ort_cuda_plugin.compiler.caches.calibration_cache import calibration_of
from ort_cuda_plugin.estimate import gather
from ort_cuda_plugin.estimate.gather import ShapeError
from ort_cuda_plugin.gpus import accuracy
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.pages.model_graph import GraphNode, ModelGraph
from ort_cuda_plugin.plan.residency import BudgetTooSmall
from ort_cuda_plugin.plugin_library import EP_NAME, plugin_version
from ort_cuda_plugin.session_errors import explained

if TYPE_CHECKING:
    from ort_cuda_plugin.estimate.model import Estimate
    from ort_cuda_plugin.gpus import Gpu
    from ort_cuda_plugin.gpus.calibration import Calibration, ProbedDevice
    from ort_cuda_plugin.gpus.constants import Constants

_SHORT_NAME = 60
_LEAST_SECONDS = 1e-6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    add_operators_argument(parser)
    parser.add_argument("--device", choices=gpus.names(), default="h100")
    parser.add_argument(
        "--shapes",
        action="append",
        default=[],
        metavar="NAME=1x3x224x224[,...]",
        help="shapes of inputs (repeatable); a dimension that neither the model nor --shapes gives is 1",
    )
    parser.add_argument(
        "--values",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help="value of all elements of an integer input (repeatable); default: 0, and 1 where it determines shapes",
    )
    parser.add_argument(
        "--uncalibrated",
        action="store_true",
        help="use the packaged rates of the GPU, even if `ort-cuda-plugin calibrate` has measured a GPU of this "
        "kind on this machine",
    )
    parser.add_argument(
        "--weight-budget",
        type=_weight_budget,
        metavar="BYTES",
        help="device memory for weights, such as 8G: add the time for which steps wait for copies of streamed weights",
    )
    parser.add_argument("--top", type=int, default=0, metavar="N", help="print only the N longest steps")
    parser.add_argument(
        "--measurements",
        type=Path,
        metavar="FILE",
        help="JSON file of kernel times measured on a GPU; constants of the performance model are fitted to them",
    )
    parser.add_argument(
        "--html", type=output_file, metavar="FILE", help="write a web page with a bar for every step to this file"
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all figures to this file (JSON)")


def _weight_budget(text: str) -> int | None:
    from ort_cuda_plugin.ep.options.option_values import BYTE_BUDGET

    try:
        budget = BYTE_BUDGET(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if isinstance(budget, float):
        raise argparse.ArgumentTypeError("got a share of device memory, expected bytes such as 8G")
    return None if budget is None else int(budget)


def execute(arguments: argparse.Namespace) -> int:
    path = model_path(arguments.model)
    shapes = {name: shape(name, text) for name, text in named_values("--shapes", arguments.shapes)}
    values = {name: number(name, text) for name, text in named_values("--values", arguments.values)}
    try:
        with unavailable_as_user_error():
            import onnxruntime  # noqa: F401 -- whether it is there
        constants = _fitted(arguments.measurements) if arguments.measurements else None
        gpu = gpus.gpu(arguments.device)
        is_described = arguments.uncalibrated or constants is not None
        calibrated = None if is_described else known_calibration(gpu)
        with waiting(Console(stderr=True), "planning"):
            model = gather.optimized(path, shapes)
            found = estimate_optimized(model, gpu, shapes, values, constants, calibrated, arguments.weight_budget)
    except BudgetTooSmall as error:
        raise UserError(
            ExitCode.USAGE,
            f"--weight-budget: got {arguments.weight_budget} bytes, expected at least {error.needed}, for weights that "
            "must stay on the device and for the streamed weights that one step reads",
        ) from error
    except ShapeError as error:
        raise UserError(ExitCode.USAGE, f"--shapes: {error}") from error
    except Exception as error:
        raise UserError(ExitCode.MODEL_FAILED, f"{arguments.model}: {explained(error, str(path), [])}") from error
    print_estimate(found, output_console(), arguments.top)
    if arguments.json:
        arguments.json.write_text(json_text(found.data()), encoding="utf-8")
    if arguments.html:
        from ort_cuda_plugin.estimate.page import page

        known = gather.with_shapes(model, gather.input_shapes(model, shapes))
        lines = [accuracy.error_text(), *summary(found)]
        text = page(path.stem, found, lines, onnx_graph(known, found.elsewhere))
        arguments.html.write_text(text, encoding="utf-8")
    return ExitCode.OK


def _fitted(path: Path) -> Constants:
    """Return the cost model's constants, fitted to a file of measurements. Raises UserError if it cannot be read."""
    from ort_cuda_plugin.estimate import fit

    try:
        device, measurements = fit.read_measurements(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(ExitCode.USAGE, f"{path}: {error}") from error
    return fit.fit(device, measurements).constants


def known_calibration(gpu: Gpu) -> tuple[ProbedDevice, Calibration] | None:
    """Return the latest calibration of such a GPU on this machine, and the device; None without one."""
    return calibration_of(gpu, plugin_version())


def estimate_model(
    path: Path,
    gpu: Gpu,
    shapes: dict[str, tuple[int, ...]],
    values: dict[str, int],
    constants: Constants | None = None,
    calibrated: tuple[ProbedDevice, Calibration] | None = None,
    weight_budget: int | None = None,
) -> Estimate:
    """Estimate a model file for a GPU, with the measured rates of ``calibrated`` if it is given.

    ``weight_budget``: bytes of device memory for weights, None for no limit.

    Raises BudgetTooSmall, ShapeError, NodeError, and ONNX Runtime's errors about bad models.
    """
    model = gather.optimized(path, shapes)
    return estimate_optimized(model, gpu, shapes, values, constants, calibrated, weight_budget)


def estimate_optimized(
    model: onnx.ModelProto,
    gpu: Gpu,
    shapes: dict[str, tuple[int, ...]],
    values: dict[str, int],
    constants: Constants | None = None,
    calibrated: tuple[ProbedDevice, Calibration] | None = None,
    weight_budget: int | None = None,
) -> Estimate:
    """Estimate a model that `gather.optimized` returned, see `estimate_model`.

    Raises BudgetTooSmall, ShapeError and NodeError.
    """
    from ort_cuda_plugin.estimate.model import estimate
    from ort_cuda_plugin.estimate.transfers.weight_streaming import streaming

    device, rates = calibrated or (None, None)
    work = gather.work_of_model(model, shapes, values, gpu=gpu, calibration=rates)
    if rates is None:
        found = estimate(work, gpu, constants)
    else:
        found = replace(estimate(work, rates.gpu(gpu), rates.constants(gpu)), calibrated=str(device))
    if weight_budget is None:
        return found
    seconds = [step.seconds for step in found.steps]
    copies = streaming(work.weight_bytes, work.weight_reads, work.states, seconds, gpu, weight_budget)
    return replace(found, streaming=copies)


def onnx_graph(model: onnx.ModelProto, elsewhere: Sequence[str]) -> ModelGraph:
    """Return a model's graph for the page of its estimate. Nodes that ``elsewhere`` names run on other providers."""
    nodes = []
    for node in read_model(model).nodes:
        inputs = tuple(value.name for value in node.reads() if value is not None and value.initializer is None)
        outputs = tuple(value.name for value in node.outputs if value is not None)
        is_own = node.label not in elsewhere
        provider = EP_NAME if is_own else "another provider"
        nodes.append(
            GraphNode(node.own_name, node.op_type, inputs, outputs, "plan" if is_own else "", provider, is_own)
        )
    graph = model.graph
    values = {info.name: _type_text(info) for info in (*graph.input, *graph.value_info, *graph.output)}
    return ModelGraph(nodes, (), values, "")


def _type_text(info: onnx.ValueInfoProto) -> str:
    """Return type and shape as ``FLOAT[2, n]``; "" if the element type is unknown."""
    tensor = info.type.tensor_type
    if not tensor.elem_type:
        return ""
    sizes = [str(dim.dim_value) if dim.HasField("dim_value") else dim.dim_param or "?" for dim in tensor.shape.dim]
    shape = ", ".join(sizes) if tensor.HasField("shape") else "..."
    return f"{onnx.TensorProto.DataType.Name(tensor.elem_type)}[{shape}]"


def print_estimate(found: Estimate, console: Console, top: int = 0) -> None:
    console.print(accuracy.error_text(), highlight=False)
    table = Table("step", "of", title=f"{found.label}, estimated", title_justify="left")
    for name in ("us", "roofline", "MB", "DRAM MB", "of peak", "bound"):
        table.add_column(name, justify="right")
    shown = found.steps if not top else sorted(found.steps, key=lambda step: -step.seconds)[:top]
    for step in shown:
        nodes = ", ".join(step.nodes)
        nodes = nodes if len(nodes) <= _SHORT_NAME else f"{nodes[:_SHORT_NAME]}..."
        figures = [accuracy.range_text(accuracy.step_range(step.seconds)), f"{step.roofline * 1e6:.1f}"]
        figures += [f"{nbytes / 1e6:.2f}" for nbytes in (step.touched, step.dram)]
        table.add_row(step.name, nodes, *figures, f"{step.share:.0%}", step.bound)
    console.print(table)
    for line in summary(found):
        console.print(line, highlight=False)


def summary(found: Estimate) -> list[str]:
    """Return lines of text about the estimate of the whole Run."""
    lines = [
        f"A Run takes {accuracy.range_text(accuracy.run_range(found.seconds), 0)} us and moves"
        f" {found.dram / 1e6:.1f} MB between device memory and the L2 cache."
        f" Steps: {len(found.steps)}.",
        f"The roofline of the model is {_microseconds(found.roofline)}: {found.compulsory / 1e6:.1f} MB of inputs,"
        f" weights and outputs, {found.flops / 1e9:.2f} GFLOP.{_times(found.roofline, found.ratio)}",
        f"The sum of the steps' rooflines, with intermediate tensors and launches, is"
        f" {_microseconds(found.steps_roofline)}.{_times(found.steps_roofline, found.steps_ratio)}",
    ]
    if (copies := found.streaming) is not None:
        lines.append(
            f"{copies.resident / 1e6:.1f} MB of weights are resident; a Run copies {copies.nbytes / 1e6:.1f} MB in "
            f"{copies.copies} copies, which take {copies.link_seconds * 1e6:.0f} us on the link, at "
            f"{found.device.copied_per_second / 1e9:.1f} GB/s. Steps wait for copies for {copies.waiting * 1e6:.0f} us."
        )
    if found.calibrated:
        lines.append(f"`ort-cuda-plugin calibrate` has measured the rates on {found.calibrated}.")
    if found.elsewhere:
        lines.append(f"Nodes of other providers, not estimated: {len(found.elsewhere)}.")
    return lines


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds >= _LEAST_SECONDS else "less than 1 us"


def _times(roofline: float, ratio: float) -> str:
    """Return a sentence with the ratio of estimate to roofline; "" for a roofline below `_LEAST_SECONDS`."""
    return f" The middle of the estimate is {ratio:.2f} times the roofline." if roofline >= _LEAST_SECONDS else ""
