"""Run a model and show where the time of a Run goes: by ONNX node, step and kernel, on the device and on the host.

The times come from ONNX Runtime's profile (docs/profiling.md), over the Runs after the first ones: device times are
medians, host times of nodes are means. On the emulated device the estimate of a GPU is shown as well, and on a
calibrated GPU its own.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rich.console import Console
from rich.table import Table

from ort_cuda_plugin import gpus
from ort_cuda_plugin.api import Placement
from ort_cuda_plugin.cli.common import add_model_arguments, model_path, output_console, output_file, waiting
from ort_cuda_plugin.cli.devices import select_device
from ort_cuda_plugin.cli.exit_codes import ExitCode, UserError
from ort_cuda_plugin.cli.models.explain_page import model_graph
from ort_cuda_plugin.cli.plain_text import json_text
from ort_cuda_plugin.cli.runs.run import add_input_arguments, load, with_hint
from ort_cuda_plugin.ep.device.open_device import use_device
from ort_cuda_plugin.gpus import accuracy
from ort_cuda_plugin.profiles.collect import Plans, Profile, View
from ort_cuda_plugin.profiles.measure import NO_WORK, record
from ort_cuda_plugin.profiles.page import estimated_range, megabytes, page, percent, rate

if TYPE_CHECKING:
    from ort_cuda_plugin.ep.device.devices import DeviceInfo
    from ort_cuda_plugin.estimate.model import Estimate

VIEWS = get_args(View)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="number of timed Runs (default 5)")
    add_input_arguments(parser)
    parser.add_argument("--by", choices=VIEWS, default="steps", help="what each row of the table is (default steps)")
    parser.add_argument("--top", type=int, default=0, metavar="N", help="print only the N longest rows")
    parser.add_argument(
        "--html", type=output_file, metavar="FILE", help="write a web page with all tables to this file"
    )
    parser.add_argument(
        "--timeline", type=output_file, metavar="FILE", help="write the Runs as a Perfetto trace to this file"
    )
    parser.add_argument(
        "--trace", type=output_file, metavar="FILE", help="write ONNX Runtime's own profile to this file"
    )
    parser.add_argument(
        "--gpu",
        choices=[*gpus.names(), "none"],
        help="the GPU whose estimate is shown next to the measured times (default: h100 on the emulated device, else "
        "the GPU itself if it is calibrated)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def execute(arguments: argparse.Namespace) -> int:
    path = model_path(arguments.model)
    if arguments.runs < 1:
        raise UserError(ExitCode.USAGE, f"--runs {arguments.runs}: must be at least 1")
    emulate = select_device(arguments.device)
    try:
        found, estimate, events, plans, placement = measure(path, emulate, arguments)
    except UserError:
        raise
    except Exception as error:
        raise UserError(ExitCode.MODEL_FAILED, f"{arguments.model}: {with_hint(error, path, arguments)}") from error
    if not found.steps:
        raise UserError(ExitCode.UNAVAILABLE, f"{arguments.model}: the profile has no work on the device: {NO_WORK}")
    if arguments.timeline is not None:
        from ort_cuda_plugin.profiles.timeline import timeline

        arguments.timeline.write_text(
            json.dumps(timeline(events, plans, found.device_name, estimate)), encoding="utf-8"
        )
    if arguments.html is not None:
        graph = model_graph(placement, (), "")
        arguments.html.write_text(page(found, [*heading(found), *summary(found)], graph), encoding="utf-8")
    if arguments.json:
        print(json_text(asdict(found)))
    else:
        print_table(found, arguments.by, arguments.top)
    return ExitCode.OK


def measure(
    path: Path, emulate: bool, arguments: argparse.Namespace
) -> tuple[Profile, Estimate | None, list[dict[str, Any]], Plans, Placement]:
    """Run the model; return its profile, the estimate, ONNX Runtime's profiling events, the plans of clusters, and the
    placement of nodes.
    """
    with waiting(Console(stderr=True), f"running {path.name}"):
        source, names, feeds = load(path, arguments)
        recording = record(source, names, feeds, arguments.runs, path.stem, emulate)
    if arguments.trace is not None:
        arguments.trace.write_text(recording.trace, encoding="utf-8")
    found, plans = recording.profile, recording.plans
    shapes = {name: tuple(array.shape) for name, array in feeds.items()}
    estimate = _estimate(path, arguments.gpu or ("h100" if emulate else ""), shapes, recording.device)
    if estimate is not None:
        from ort_cuda_plugin.profiles.estimated import beside

        found = beside(found, plans, estimate)
    return found, estimate, recording.events, plans, recording.placement


def _estimate(path: Path, name: str, shapes: dict[str, tuple[int, ...]], device: DeviceInfo) -> Estimate | None:
    """Return the result of `estimate_for`. If it fails, print the reason and return None."""
    try:
        return estimate_for(path, name, shapes, device)
    except Exception as error:  # the measured times are worth showing without an estimate
        Console(stderr=True).print(f"no estimate for {name or device.name}: {error}", markup=False, soft_wrap=True)
        return None


def estimate_for(path: Path, name: str, shapes: dict[str, tuple[int, ...]], device: DeviceInfo) -> Estimate | None:
    """Return the estimate for the GPU ``name``, or for the profiled ``device`` if the name is ""; None for "none".

    If no GPU of that name is calibrated on this machine, the estimate uses the packaged rates. The profiled device must
    be calibrated: its measured times are not worth comparing with an estimate by packaged rates.

    Raises: LookupError: the profiled device is not calibrated. Exceptions of `estimate_model`.
    """
    from ort_cuda_plugin.cli.models.estimate import estimate_model, known_calibration

    if name == "none":
        return None
    if name:
        gpu = gpus.gpu(name)
        calibrated = known_calibration(gpu)
    else:
        opened = use_device(device)
        gpu, rates = opened.described, opened.calibration
        if rates is None:
            raise LookupError(
                "the GPU is not calibrated. Run `ort-cuda-plugin calibrate`, or choose a known GPU with --gpu"
            )
        calibrated = opened.probed, rates
    with waiting(Console(stderr=True), f"estimating for {name or device.name}"):
        return estimate_model(path, gpu, shapes, {}, calibrated=calibrated)


def print_table(found: Profile, by: str, top: int) -> None:
    console = output_console()
    rows = {"nodes": _node_rows, "steps": _step_rows, "kernels": _kernel_rows, "host": _host_rows}[by](found)
    table = Table(title=f"{found.model} on {found.device_name}", title_justify="left")
    estimated = [f"us on {found.gpu}, estimated"] if found.gpu and by in ("nodes", "steps") else []
    for line in heading(found):
        console.print(line, highlight=False)
    for name in (*_HEADS[by], *estimated):
        table.add_column(name, justify="left" if name in _TEXTS else "right")
    rows = sorted(rows, key=lambda row: -row[0])[:top] if top else rows
    for _, *cells in rows:
        table.add_row(*cells)
    console.print(table)
    for line in summary(found):
        console.print(line, highlight=False)


_HEADS = {
    "nodes": ("us", "share", "node", "operator", "steps"),
    "steps": ("us", "share", "MB", "GB/s", "of peak", "work", "nodes"),
    "kernels": ("us", "share", "launches", "MB", "kernel", "kind"),
    "host": ("us", "node as ONNX Runtime runs it", "operator", "provider"),
}
_TEXTS = ("node", "operator", "work", "nodes", "kernel", "kind", "node as ONNX Runtime runs it", "provider")


def heading(found: Profile) -> list[str]:
    """Return the line above the tables that states the errors of estimates; no line for a profile without estimates."""
    return [accuracy.error_text()] if found.gpu else []


def summary(found: Profile) -> list[str]:
    """Return lines of text about the times of the whole Run."""
    copies = sum(step.microseconds for step in found.steps if step.kind == "copy")
    lines = [
        f"A Run takes {found.run:.1f} us; for {found.host_alone:.1f} us of it the device is idle.",
        f"The device takes {found.device:.1f} us, {copies:.1f} of them for copies. Steps: {len(found.steps)}."
        f" {found.accounted:.1%} of that is attributed to nodes.",
    ]
    estimated = [node.estimated for node in found.nodes if node.estimated is not None]
    if found.gpu:
        whole = accuracy.range_text(accuracy.run_range(sum(estimated) * 1e-6), 0)
        took = sum(node.microseconds for node in found.nodes if node.estimated is not None)
        measured = "" if found.is_emulated else f"; they took {took:.1f} us"
        lines.append(f"On {found.gpu}, the estimate is {whole} us for {len(estimated)} of these nodes{measured}.")
    return lines


def _node_rows(found: Profile) -> list[Any]:
    return [
        [each.microseconds, f"{each.microseconds:.1f}", f"{each.share:.1%}", each.name, each.op_type, str(each.steps)]
        + _estimated(found, each.estimated)
        for each in found.nodes
    ]


def _step_rows(found: Profile) -> list[Any]:
    rows = []
    for each in found.steps:
        nodes = ", ".join(f"{name} ({op_type})" for name, op_type in zip(each.nodes, each.op_types, strict=True))
        figures = [f"{each.microseconds:.1f}", f"{each.share:.1%}", megabytes(each.bytes), rate(each)]
        rows.append(
            [each.microseconds, *figures, percent(each.peak), each.name, nodes or "-"]
            + _estimated(found, each.estimated)
        )
    return rows


def _kernel_rows(found: Profile) -> list[Any]:
    return [
        [each.microseconds, f"{each.microseconds:.1f}", f"{each.share:.1%}", str(each.launches)]
        + [megabytes(each.bytes), each.name, each.kind]
        for each in found.kernels
    ]


def _host_rows(found: Profile) -> list[Any]:
    return [
        [each.microseconds, f"{each.microseconds:.1f}", each.name, each.op_type, each.provider] for each in found.host
    ]


def _estimated(found: Profile, value: float | None) -> list[str]:
    return [estimated_range(value)] if found.gpu else []
