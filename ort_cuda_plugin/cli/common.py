"""What several commands need: the choice of a device, the model argument, errors made readable."""

from __future__ import annotations

import argparse
import atexit
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from rich.console import Console

import ort_cuda_plugin
from ort_cuda_plugin import models
from ort_cuda_plugin.cli.exit_codes import ExitCode, UserError
from ort_cuda_plugin.networks import NETWORKS, build, split_name

MODEL_HELP = (
    "path of an ONNX file, the name of a model in the onnx wheel (light_resnet50, ...), or a network with its element"
    f" type: {', '.join(NETWORKS)} (resnet50:float16, ...)"
)
_WIDE = 1000
SECONDS_TO_MENTION = 1.0
"""Of compilation, where the output is no terminal."""
DEVICES = ("auto", "cuda", "emulated")


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
        help="a Python file that registers operators which the model has; may be given again",
    )


def operators_file(text: str) -> Path:
    """The type of an argument that names a Python file with operators: it is run."""
    spec = importlib.util.spec_from_file_location(Path(text).stem, text)
    if spec is None or spec.loader is None or not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise argparse.ArgumentTypeError(f"{text} failed with {type(error).__name__}: {error}") from error
    return Path(text)


def add_device_argument(parser: argparse.ArgumentParser, default: str = "auto") -> None:
    parser.add_argument(
        "--device", choices=DEVICES, default=default, help="auto: a GPU where there is one, else the emulated device"
    )


def output_file(text: str) -> Path:
    """The type of an argument that names a file to write: a wrong one is refused before the work, not after."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    return path


def model_path(name_or_path: str) -> Path:
    """The file of a model; that of a network is written, and removed when the process ends."""
    if not Path(name_or_path).is_file() and split_name(name_or_path) is not None:
        return written_model(build(name_or_path).SerializeToString(), name_or_path.replace(":", "_"))
    try:
        return models.find_model(name_or_path)
    except models.ModelNotFoundError as error:
        raise UserError(ExitCode.USAGE, str(error)) from None


def written_model(model: bytes, name: str) -> Path:
    """A file that is removed when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="ort-cuda-plugin-")
    atexit.register(folder.cleanup)
    path = Path(folder.name, f"{name}.onnx")
    path.write_bytes(model)
    return path


def usual_sizes(name_or_path: str) -> dict[str, int]:
    """Sizes of symbolic dimensions that the user need not give: those of a network."""
    parts = split_name(name_or_path)
    return dict(NETWORKS[parts[0]].sizes) if parts and not Path(name_or_path).is_file() else {}


def find_device(choice: str) -> bool:
    """Whether to use the emulated device."""
    with unavailable_as_user_error():
        from ort_cuda_plugin.ep.devices import cuda_devices

        found, why = ([], "") if choice == "emulated" else cuda_devices()
        if choice == "cuda" and not found:
            raise UserError(ExitCode.UNAVAILABLE, f"no CUDA device: {why}; try --device emulated")
        return not found


def select_device(choice: str) -> bool:
    """Registers the plugin and says whether to use the emulated device."""
    emulate = find_device(choice)
    with unavailable_as_user_error():
        ort_cuda_plugin.register(emulate=emulate)
    return emulate


@contextmanager
def unavailable_as_user_error() -> Iterator[None]:
    """ORT missing or too old, a library that cannot be loaded, an environment variable without a valid value."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # ONNX Runtime has types of its own
        raise UserError(ExitCode.UNAVAILABLE, str(error)) from error


def output_console() -> Console:
    """For what a command prints. Where that is no terminal nothing cuts a table off."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else _WIDE)


@contextmanager
def waiting(console: Console, what: str) -> Iterator[None]:
    """A spinner on the terminal while the user waits, with the kernels that are compiled meanwhile.

    Where the output is no terminal, a line says that kernels are compiled.
    """
    from ort_cuda_plugin.ep.open_device import kernel_library

    library = kernel_library()
    asked = done = 0
    with console.status(what) if console.is_terminal else nullcontext() as status:

        def watch(more: int, fewer: int) -> None:
            nonlocal asked, done
            asked, done = asked + more, done + fewer
            if status is not None:
                status.update(f"{what}: {done} of {asked} kernels")

        def compiling(kernels: int, seconds: float) -> None:
            if status is None and seconds >= SECONDS_TO_MENTION:
                console.print(f"compiling {kernels} kernels, about {seconds:.0f} s of one core", markup=False)

        library.watch, library.compiling = watch, compiling
        try:
            yield
        finally:
            library.watch = library.compiling = None


def named_values(texts: list[str]) -> list[tuple[str, str]]:
    """Names and values of arguments that are ``NAME=VALUE``, or several of them with commas between."""
    pairs = []
    for part in (part for text in texts for part in text.split(",")):
        name, equals, value = part.rpartition("=")
        if not equals or not name:
            raise UserError(ExitCode.USAGE, f"{part!r} is not NAME=...")
        pairs.append((name, value))
    return pairs


def shape(text: str) -> tuple[int, ...]:
    """The sizes of ``1x3x224x224``; none of a scalar's, which is empty."""
    sizes = text.split("x") if text else []
    if not all(size.isdecimal() for size in sizes):
        raise UserError(ExitCode.USAGE, f"{text!r} is not a shape such as 1x3x224x224")
    return tuple(map(int, sizes))


def number(text: str) -> int:
    """A whole number."""
    try:
        return int(text)
    except ValueError:
        raise UserError(ExitCode.USAGE, f"{text!r} is not a number") from None
