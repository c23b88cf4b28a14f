"""Compare a model's results with those of another execution provider, and find the first node that differs.

``--find nonfinite`` instead finds the first node of the plugin that turns finite inputs into infinities or NaN.

Outputs may differ as much as their element type allows. Inputs and the outputs of both sides can be saved and loaded
(.npz), so that results of another machine can be compared.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from rich.console import Console
from rich.table import Table
from rich.text import Text

import ort_cuda_plugin
from ort_cuda_plugin.api import create_session
from ort_cuda_plugin.cli.common import (
    add_model_arguments,
    model_path,
    named_values,
    numpy_file,
    output_console,
    output_file,
    provider_options,
    waiting,
)
from ort_cuda_plugin.cli.devices import select_device
from ort_cuda_plugin.cli.exit_codes import ExitCode, UserError
from ort_cuda_plugin.cli.plain_text import json_text
from ort_cuda_plugin.cli.runs.compare_nonfinite import show_nonfinite
from ort_cuda_plugin.cli.runs.run import add_input_arguments, load, with_hint
from ort_cuda_plugin.comparison.bisection import FirstDifference, Run, first_difference
from ort_cuda_plugin.comparison.differences import TOLERANCES, UNROUNDED_INPUTS, Difference, differences
from ort_cuda_plugin.session_errors import only_ours

_SHORT = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
_WHOLE = [f"{sign}int{bits}" for bits in (8, 16, 32, 64) for sign in ("", "u")]
_TYPES = [*TOLERANCES, *_WHOLE, "bool"]
_EXTERNAL_FOLDER = "session.model_external_initializers_file_folder_path"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--against", metavar="EP", help="cpu (default), cuda, or the name of an execution provider")
    parser.add_argument(
        "--find",
        choices=("difference", "nonfinite"),
        default="difference",
        help="what to look for: the first node that differs between the providers (default), or the first node of the "
        "plugin that turns finite inputs into infinities or NaN",
    )
    add_input_arguments(parser)
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="a provider option for the plugin"
    )
    parser.add_argument(
        "--tolerance",
        action="append",
        default=[],
        metavar="TYPE=NUMBER",
        help="largest allowed error max|a-b|/max|b| of an element type; default: "
        f"{', '.join(f'{name}={value:g}' for name, value in TOLERANCES.items())}, others 0",
    )
    parser.add_argument("--save", type=output_file, metavar="FILE.npz", help="write inputs and outputs to this file")
    parser.add_argument(
        "--load",
        type=Path,
        metavar="FILE.npz",
        help="read the inputs from this file, and the outputs of the other provider if the file has them",
    )
    parser.add_argument("--no-bisect", action="store_true", help="do not look for the first node that differs")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def execute(arguments: argparse.Namespace) -> int:
    path = model_path(arguments.model)
    given = named_values("--tolerance", arguments.tolerance)
    tolerances = {**TOLERANCES, **{name: _tolerance(name, text) for name, text in given}}
    options = provider_options(arguments.option)
    _check_mode(arguments)
    asked = arguments.against or "cpu"
    against = _SHORT.get(asked.lower(), asked)
    emulate = select_device(arguments.device)
    saved = _read(arguments.load) if arguments.load else {}
    source, names, feeds = load(path, arguments)
    if arguments.load:
        feeds = _loaded(arguments, feeds, saved)
    sides = _Sides(path.parent, emulate, options, against)
    try:
        if arguments.find == "nonfinite":
            listed = options.get("keep_float32", "")
            return show_nonfinite(source, path.parent, feeds, listed, sides.own_with, arguments.json)
        with waiting(Console(stderr=True), "running both"):
            actual = sides.own(source, names, feeds)
            kept = [saved.get(f"outputs/{against}/{name}") for name in names]
            is_kept = all(value is not None for value in kept)
            expected = kept if is_kept else sides.reference(source, names, feeds)
        found = differences(names, actual, expected, tolerances)
        if arguments.save:
            _write(arguments.save, feeds, names, {ort_cuda_plugin.get_ep_name(): actual, against: expected})
        is_right = all(difference.is_small for difference in found)
        first, why = None, ""
        if not (is_right or arguments.no_bisect):
            first, why = _first(source, feeds, sides, tolerances, is_kept)
    except UserError:
        raise
    except Exception as error:
        raise UserError(ExitCode.MODEL_FAILED, f"{arguments.model}: {with_hint(error, path, arguments)}") from error
    if arguments.json:
        plain = {"against": against, "outputs": [asdict(each) for each in found], "why_no_node": why}
        print(json_text(plain | {"first_node": None if first is None else asdict(first)}))
    else:
        _print(against, found, first, why)
    return ExitCode.OK if is_right else ExitCode.MISMATCH


def _check_mode(arguments: argparse.Namespace) -> None:
    """Raise UserError for an argument that the mode of ``--find`` does not use."""
    unused = ("against", "tolerance", "save", "no_bisect") if arguments.find == "nonfinite" else ()
    for name in unused:
        if getattr(arguments, name):
            option = f"--{name.replace('_', '-')}"
            raise UserError(
                ExitCode.USAGE, f"{option}: --find nonfinite runs the model on the plugin only. Leave {option} out"
            )


class _Sides:
    """Runs models on the plugin and on another provider. Raises UserError if ONNX Runtime lacks the other provider."""

    def __init__(self, folder: Path, emulate: bool, options: Mapping[str, str], against: str) -> None:
        import onnxruntime as ort

        if against not in ort.get_available_providers():
            known = ", ".join(ort.get_available_providers())
            raise UserError(
                ExitCode.UNAVAILABLE,
                f"--against {against}: this ONNX Runtime has only the providers {known}. Choose one of them",
            )
        self.folder, self.emulate, self.options, self.against = folder, emulate, options, against

    def own(self, source: str | bytes | onnx.ModelProto, names: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
        session, _ = create_session(_plain(source), self.emulate, self.options, self._settings())
        return list(session.run(list(names), dict(feeds)))

    def own_with(self, options: Mapping[str, str]) -> Run:
        """Return the function that runs a model on the plugin with further provider options."""
        return _Sides(self.folder, self.emulate, {**self.options, **options}, self.against).own

    def reference(
        self, source: str | bytes | onnx.ModelProto, names: Sequence[str], feeds: Mapping[str, Any]
    ) -> list[Any]:
        import onnxruntime as ort

        providers = list(dict.fromkeys([self.against, _SHORT["cpu"]]))
        try:
            session = ort.InferenceSession(_plain(source), self._settings(), providers=providers)
        except Exception as error:
            if reason := only_ours(error):
                raise UserError(ExitCode.UNAVAILABLE, f"--against {self.against}: {reason}") from error
            raise
        return list(session.run(list(names), dict(feeds)))

    def _settings(self) -> Any:
        import onnxruntime as ort

        settings = ort.SessionOptions()
        settings.log_severity_level = 3
        settings.add_session_config_entry(*UNROUNDED_INPUTS)
        settings.add_session_config_entry(_EXTERNAL_FOLDER, str(self.folder.resolve()))
        return settings


def _plain(source: str | bytes | onnx.ModelProto) -> str | bytes:
    return source.SerializeToString() if isinstance(source, onnx.ModelProto) else source


def _first(
    source: str | bytes, feeds: Mapping[str, Any], sides: _Sides, tolerances: Mapping[str, float], is_kept: bool
) -> tuple[FirstDifference | None, str]:
    """Return the first node whose results differ, and "". If it is unknown, return None and the reason.

    ``is_kept`` says whether a file, given with ``--load``, had the reference's outputs.
    """
    if isinstance(source, bytes):
        model = onnx.load_from_string(source)
    else:
        model = onnx.load(source, load_external_data=False)
    console = Console(stderr=True)
    try:
        with waiting(console, "looking for the first node that differs"):
            first = first_difference(model, feeds, sides.own, sides.reference, tolerances)
    except Exception as error:  # a difference of outputs is worth showing without the node
        return (
            None,
            f"the first node that differs is unknown, because the model cannot be split into submodels: {error}",
        )
    reason = "fusion, or the way in which the loaded outputs were computed" if is_kept else "fusion"
    if first is not None:
        return first, ""
    return None, f"no node differs if it runs alone, without fusion: the cause of the difference is {reason}"


def _print(against: str, found: Sequence[Difference], first: FirstDifference | None, why: str) -> None:
    table = Table(
        "output", "type", "shape", "largest error", "allowed", "verdict", title=f"plugin compared with {against}"
    )
    for each in found:
        verdict: str | Text = "ok" if each.is_small else Text("DIFFERS", "bold red")
        shape = "x".join(map(str, each.shape)) or "scalar"
        table.add_row(each.name, each.type, shape, _shown(each.error), _shown(each.tolerance), verdict)
    console = output_console()
    console.print(table)
    if why:
        console.print(why)
    if first is None:
        return
    values = ", ".join(f"{each.name} by {_shown(each.error)}" for each in first.found)
    console.print(f"the first node that differs is number {first.number}, {first.name} ({first.op_type}): {values}")
    if first.alone:
        values = ", ".join(f"{each.name} by {_shown(each.error)}" for each in first.alone)
        console.print(f"if it gets the same inputs from {against}, the node differs as well: {values}")
    else:
        console.print(
            f"if it gets the same inputs from {against}, the node agrees: it amplifies differences of its "
            "inputs that are"
            " within the tolerance"
        )


def _shown(number: float) -> str:
    return "not comparable" if math.isinf(number) else f"{number:.2e}"


def _tolerance(name: str, text: str) -> float:
    if name not in _TYPES:
        raise UserError(ExitCode.USAGE, f"--tolerance {name}: not an element type. Choose from {', '.join(_TYPES)}")
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise UserError(ExitCode.USAGE, f"--tolerance {name}={text}: expected a number of at least 0")
    return value


def _read(path: Path) -> dict[str, Any]:
    values = numpy_file(f"--load {path}", path)
    if not isinstance(values, dict):
        raise UserError(ExitCode.USAGE, f"--load {path}: expected an archive of arrays (.npz) that --save wrote")
    if not any(name.startswith("inputs/") for name in values):
        raise UserError(
            ExitCode.USAGE, f"--load {path}: expected arrays named inputs/NAME, as --save writes them, got none"
        )
    return values


def _loaded(arguments: argparse.Namespace, feeds: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs, from the file of ``--load`` or from ``--input``.

    Raises UserError if both have the same input, or if an input of the model is in neither.
    """
    given = {text.partition("=")[0] for text in arguments.input}
    loaded = {key.removeprefix("inputs/"): value for key, value in saved.items() if key.startswith("inputs/")}
    if both := sorted(given & loaded.keys()):
        raise UserError(
            ExitCode.USAGE, f"--input {both[0]}: --load {arguments.load} has this input too. Give only one of the two"
        )
    if missing := sorted(feeds.keys() - given - loaded.keys()):
        text = f"--load {arguments.load}: the file lacks input {missing[0]!r}. Its inputs: {', '.join(sorted(loaded))}"
        raise UserError(ExitCode.USAGE, text)
    return {name: loaded.get(name, value) for name, value in feeds.items()}


def _write(path: Path, feeds: Mapping[str, Any], names: Sequence[str], sides: Mapping[str, Sequence[Any]]) -> None:
    """Write inputs and each side's outputs to a file; values that are not numeric tensors are left out."""
    values = {f"inputs/{name}": value for name, value in feeds.items()}
    for side, outputs in sides.items():
        values |= {f"outputs/{side}/{name}": value for name, value in zip(names, outputs, strict=True)}
    numbers: dict[str, Any] = {
        key: value for key, value in values.items() if isinstance(value, np.ndarray) and value.dtype.kind in "biufc"
    }
    with path.open("wb") as file:
        np.savez_compressed(file, **numbers)
