"""Helpers that commands share: the model argument, the console, and files."""

from __future__ import annotations

import argparse
import atexit
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.status import Status
from rich.text import Text

from ort_cuda_plugin import models
from ort_cuda_plugin.abi.message_texts import printable
from ort_cuda_plugin.cli.devices import add_device_argument
from ort_cuda_plugin.cli.exit_codes import ExitCode, UserError
from ort_cuda_plugin.custom.files import NoOperatorsFileError, load_operators
from ort_cuda_plugin.networks import NETWORKS, build, split_name
from ort_cuda_plugin.progress.display import Lines, bar_of, requested, shown, text_of
from ort_cuda_plugin.progress.events import Progress
from ort_cuda_plugin.session_errors import what_a_file_is

_Item = TypeVar("_Item")
MODEL_HELP = (
    "path of an ONNX file, the name of a model in the onnx wheel (light_resnet50, ...), or a network with its element"
    f" type: {', '.join(NETWORKS)} (resnet50:float16, ...)"
)
_WIDE = 1000
_NO_NUMPY_TYPES = frozenset(
    number
    for name, number in onnx.TensorProto.DataType.items()
    if name == "BFLOAT16" or name.startswith(("FLOAT8", "FLOAT4", "INT4", "UINT4", "INT2", "UINT2"))
)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=MODEL_HELP,
    )
    add_device_argument(parser)
    add_operators_argument(parser)


def add_operators_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--operators",
        metavar="FILE",
        type=operators_file,
        action="append",
        help="a Python file that registers custom operators of the model (repeatable)",
    )


def operators_file(text: str) -> Path:
    """Argument type: a Python file that registers operators. The file is executed."""
    try:
        load_operators(text)
    except NoOperatorsFileError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    except Exception as error:
        raise argparse.ArgumentTypeError(
            f"{text}: running this file failed with {type(error).__name__}: {error}"
        ) from error
    return Path(text)


def output_file(text: str) -> Path:
    """Argument type: a file to write. Raises ArgumentTypeError, before the command works, if it cannot be written."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder. Give the path of a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written. Choose another file, in a folder that exists")
    return path


def model_path(name_or_path: str) -> Path:
    """Return the file of a model. A network is written to a file, which is removed at exit.

    Raises UserError if there is no such file, light model or network.
    """
    if not Path(name_or_path).is_file() and split_name(name_or_path) is not None:
        return written_model(build(name_or_path).SerializeToString(), name_or_path.replace(":", "_"))
    try:
        return models.find_model(name_or_path, NETWORKS)
    except models.ModelNotFoundError as error:
        forms = "Or give a built-in network as NAME or NAME:TYPE, such as resnet50:float16; the names are"
        raise UserError(ExitCode.USAGE, f"{error}. {forms} {', '.join(NETWORKS)}") from None


def written_model(model: bytes, name: str) -> Path:
    """Write a model to a file that is removed at exit, and return the file's path."""
    folder = tempfile.TemporaryDirectory(prefix="ort-cuda-plugin-")
    atexit.register(folder.cleanup)
    path = Path(folder.name, f"{name}.onnx")
    path.write_bytes(model)
    return path


def read_model(path: Path, name: str) -> onnx.ModelProto:
    """Read the model of a file without its external data. Raises UserError, which calls the model ``name``."""
    try:
        return onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf raises errors of its own types
        raise UserError(ExitCode.MODEL_FAILED, f"{name}: {error}. {what_a_file_is(path)}".rstrip(". ")) from error


def check_types(model: onnx.ModelProto) -> None:
    """Check types of inputs and outputs.

    Raises UserError for an input that is a sequence or a map, and for types that ONNX Runtime cannot pass as arrays.
    """
    for value in model.graph.input:
        if (form := value.type.WhichOneof("value")) in ("sequence_type", "map_type"):
            raise UserError(
                ExitCode.MODEL_FAILED,
                f"input {value.name!r} is a {form.removesuffix('_type')}, and this command feeds only tensors. Call "
                "session.run in Python. The commands explain, estimate and compile need no values of inputs",
            )
    for kind, values in (("input", model.graph.input), ("output", model.graph.output)):
        for value in values:
            element_type = value.type.tensor_type.elem_type
            if element_type in _NO_NUMPY_TYPES:
                type_name = onnx.TensorProto.DataType.Name(element_type).lower()
                raise UserError(
                    ExitCode.MODEL_FAILED,
                    f"{kind} {value.name!r}: ONNX Runtime cannot convert its element type {type_name} to or from NumPy"
                    f" arrays. Add a Cast of this {kind} to the model. The commands explain, estimate and compile need "
                    "no Cast",
                )


def usual_sizes(name_or_path: str) -> dict[str, int]:
    """Return the default sizes of a network's symbolic dimensions; {} for any other model."""
    parts = split_name(name_or_path)
    return dict(NETWORKS[parts[0]].sizes) if parts and not Path(name_or_path).is_file() else {}


class _PlainConsole(Console):
    """Prints text without markup and control sequences, which names in a model may contain."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # `main` handles this; rich would exit with 1

    def render_str(self, text: str, **settings: Any) -> Text:
        return super().render_str(printable(text), **settings)


def output_console() -> Console:
    """Return the console for a command's output. If the output is not a terminal, tables are not truncated."""
    width = None if sys.stdout.isatty() else _WIDE
    return _PlainConsole(file=sys.stdout, width=width, markup=False, emoji=False)


@contextmanager
def waiting(console: Console, what: str) -> Iterator[None]:
    """Show on the terminal what the command is doing, with a bar for compiled kernels or other long work.

    If the output is not a terminal, print lines about long work. `is_silent` says whether nothing is shown.
    """
    what = printable(what)
    if console.is_terminal and not is_silent():
        with console.status(Text(what)) as status, shown(_StatusDisplay(status, what)):
            yield
    else:
        with shown(Lines(console.file)):
            yield


class _StatusDisplay:
    """Shows progress beside a spinner, which rich animates."""

    def __init__(self, status: Status, what: str) -> None:
        self._status = status
        self._what = what

    def __call__(self, event: Progress) -> None:
        self._status.update(Text(f"{self._what}  {bar_of(event)} {printable(text_of(event))}"))

    def close(self) -> None:
        """Do nothing: rich removes the status."""


def counted(items: Sequence[_Item], what: str, console: Console) -> Iterable[_Item]:
    """Return the items, and show on a terminal how many of them the caller has taken."""
    is_hidden = is_silent() or not console.is_terminal
    return track(items, escape(printable(what)), console=console, transient=True, disable=is_hidden)


def is_silent() -> bool:
    """Return whether the environment asks for no progress. Raises UserError if a variable has a wrong value."""
    try:
        return requested() is False
    except ValueError as error:
        raise UserError(ExitCode.USAGE, str(error)) from None


def named_values(option: str, texts: list[str]) -> list[tuple[str, str]]:
    """Parse ``NAME=VALUE`` arguments of ``option``; one argument may hold several, separated by commas.

    Raises UserError for another form.
    """
    pairs = []
    for part in (part for text in texts for part in text.split(",")):
        name, equals, value = part.rpartition("=")
        if not equals or not name:
            raise UserError(ExitCode.USAGE, f"{option} {part}: expected the form NAME=VALUE")
        pairs.append((name, value))
    return pairs


def provider_options(texts: list[str]) -> dict[str, str]:
    """Parse ``KEY=VALUE`` arguments of ``--option``. After a comma, a text without an equals sign continues the value:
    ``keep_float32=Pow,Add,use_tf32=0`` has two keys.
    """
    pairs: list[tuple[str, str]] = []
    for text in texts:
        first, *parts = text.split(",")
        pairs += named_values("--option", [first])
        for part in parts:
            if "=" in part:
                pairs += named_values("--option", [part])
            else:
                key, value = pairs.pop()
                pairs.append((key, f"{value},{part}"))
    return dict(pairs)


def shape(name: str, text: str) -> tuple[int, ...]:
    """Parse the shape of input ``name``, such as ``1x3x224x224``; an empty text is the shape of a scalar.

    Raises UserError for another text.
    """
    sizes = text.split("x") if text else []
    if not all(size.isdecimal() for size in sizes):
        raise UserError(ExitCode.USAGE, f"--shapes {name}={text}: expected a shape such as 1x3x224x224")
    return tuple(map(int, sizes))


def number(name: str, text: str) -> int:
    """Parse the integer value of input ``name``. Raises UserError for another text."""
    try:
        return int(text)
    except ValueError:
        raise UserError(ExitCode.USAGE, f"--values {name}={text}: expected a whole number") from None


def numpy_file(subject: str, path: Path) -> NDArray[np.generic] | dict[str, NDArray[np.generic]] | None:
    """Load the array of a .npy file, or the arrays of a .npz file; None if NumPy cannot parse the file as either.

    Raises:
        UserError: the file cannot be read, or is not a regular file; ``subject`` begins the message.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe would block
            raise UserError(ExitCode.USAGE, f"{subject}: expected a regular file, not a folder, pipe or device")
        loaded = np.load(path, allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            return loaded if isinstance(loaded, np.ndarray) else None
        with loaded:
            return {name: loaded[name] for name in loaded.files}
    except UserError:
        raise
    except OSError as error:
        raise UserError(ExitCode.USAGE, f"{subject}: {error.strerror or error}") from error
    except Exception:  # NumPy has many types: for wrong sizes in headers, broken archives, pickles
        return None
