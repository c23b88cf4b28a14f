"""The mode ``--find nonfinite`` of the command ``compare``: which node makes the first infinity or NaN."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import onnx
from rich.console import Console

from ort_cuda_plugin.cli.common import output_console, waiting
from ort_cuda_plugin.cli.exit_codes import ExitCode
from ort_cuda_plugin.cli.plain_text import json_text
from ort_cuda_plugin.comparison.nonfinite import NonfiniteNode, NonfiniteReport, WithOptions, find_nonfinite

_MAX_SHOWN = 5
"""Maximum number of nodes that the text names after the first one."""


def show_nonfinite(
    source: str | bytes, folder: Path, feeds: Mapping[str, Any], entries: str, run_with: WithOptions, as_json: bool
) -> int:
    """Print what is not finite in a Run, and return the exit code; arguments as for `find_nonfinite`."""
    if isinstance(source, bytes):
        model = onnx.load_from_string(source)
    else:
        model = onnx.load(source, load_external_data=False)
    with waiting(Console(stderr=True), "looking for the first node with a nonfinite result"):
        report = find_nonfinite(model, folder, feeds, entries, run_with)
    if as_json:
        print(json_text(asdict(report)))
    else:
        _print(report)
    return ExitCode.OK if report.is_finite else ExitCode.MISMATCH


def _print(report: NonfiniteReport) -> None:
    console = output_console()

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    for each in report.given:
        say(str(each))
    if report.is_finite:
        say("all nodes return finite values for finite inputs, and all outputs are finite")
        return
    first, others = (report.nodes[0], report.nodes[1:]) if report.nodes else (None, [])
    if first is not None:
        say(f"the first node with a nonfinite result: {_described(first)}; its inputs are finite")
    if report.first_nan is not None and report.first_nan != first:
        say(f"the first node with NaN in its result: {_described(report.first_nan)}; its inputs have no NaN")
    if others:
        shown = ", ".join(f"{node.name} ({node.op_type})" for node in others[:_MAX_SHOWN])
        more = f" and {len(others) - _MAX_SHOWN} more" if len(others) > _MAX_SHOWN else ""
        say(f"further nodes with nonfinite results of finite inputs: {shown}{more}")
    for each in report.outputs:
        say(str(each))
    if report.keep_float32:
        say(f"to compute the values beyond float16 in float32, add --option keep_float32={report.keep_float32}")
        for each in report.outputs_kept:
            say(f"with the option, {each}")
        if not report.outputs_kept:
            say("with the option, all outputs are finite")
    elif first is not None:
        say(f"the option keep_float32 does not help, because the node's result is {first.result.dtype}")
    else:
        say("no node returns nonfinite values for finite inputs: correct the inputs or weights")


def _described(node: NonfiniteNode) -> str:
    return (
        f"number {node.number}, {node.name} ({node.op_type}): {node.result}; largest finite input "
        f"{node.largest_input:.6g}"
    )
