"""The command line: ``ort-cuda-plugin`` and ``python -m ort_cuda_plugin``. One module per command.

A command module has ``add_arguments(parser)`` and ``execute(arguments) -> int``, the exit code. Only the module of the
invoked command is imported, because some commands need optional packages.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import io
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import ort_cuda_plugin
from ort_cuda_plugin.abi.message_texts import did_you_mean, printable
from ort_cuda_plugin.cli.exit_codes import ExitCode, UserError

COMMANDS = {
    "run": "runs.run",
    "profile": "runs.profile",
    "bench": "runs.bench",
    "compare": "runs.compare",
    "selftest": "runs.selftest",
    "calibrate": "runs.calibrate",
    "run-ptx": "runs.ptx",
    "exec": "runs.drop_in",
    "with": "runs.with_plugin",
    "info": "reports.info",
    "doctor": "reports.doctor",
    "explain": "models.explain",
    "estimate": "models.estimate",
    "compile": "models.compile_model",
    "inspect": "models.inspect_context",
    "kernels": "models.kernels",
    "conformance": "reports.conformance",
    "operators": "reports.operators",
    "options": "reports.options",
    "parity": "reports.parity",
}
"""The commands, with the module of each."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; see `ExitCode`."""
    _make_streams_safe()
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else ""
    with _Interrupts() as interrupts:
        try:
            code = _run(words)
            sys.stdout.flush()
        except KeyboardInterrupt:
            code = ExitCode.INTERRUPTED
        except BrokenPipeError:
            _drop_output()  # the reader closed the pipe, as `head` does
            code = ExitCode.OUTPUT_CLOSED
        except Exception as error:
            # If a callback raises KeyboardInterrupt, ONNX Runtime raises an error of another type: ask `interrupts`.
            code, text = (ExitCode.INTERRUPTED, "") if interrupts.seen else _explained(error)
            if text:
                print(printable(f"ort-cuda-plugin {name}: {text}"), file=sys.stderr)
    return int(ExitCode.INTERRUPTED if interrupts.seen else code)


def _run(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="ort-cuda-plugin",
        description="Runs ONNX models on NVIDIA GPUs or an emulated one, as an ONNX Runtime plugin.",
        epilog="exit codes: " + ", ".join(f"{code.value} {code.meaning}" for code in ExitCode),
    )
    parser.add_argument("--version", action="version", version=f"ort-cuda-plugin {ort_cuda_plugin.__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = words[0] if words else ""
    if chosen not in COMMANDS and chosen and not chosen.startswith("-"):
        hint = did_you_mean(chosen, COMMANDS)
        parser.error(f"unknown command {chosen!r}, {hint and f'{hint} '}expected one of: {', '.join(COMMANDS)}")
    for name, module in COMMANDS.items():
        description = _docstring(module)
        command = subparsers.add_parser(name, help=description.splitlines()[0], description=description)
        if name == chosen:
            try:
                implementation = importlib.import_module(f"{__name__}.{module}")
            except ModuleNotFoundError as error:
                raise UserError(ExitCode.UNAVAILABLE, _what_to_install(error)) from error
            implementation.add_arguments(command)
    arguments = parser.parse_args(words)
    return int(implementation.execute(arguments))


def _explained(error: Exception) -> tuple[int, str]:
    """Return the exit code and the message for a UserError or an OSError. Raise any other error again: it is a bug."""
    if isinstance(error, UserError):
        return error.code, str(error)
    if not isinstance(error, OSError):
        raise error
    _drop_output()
    reason = error.strerror or str(error)
    return (
        ExitCode.USAGE,
        f"{error.filename}: {reason}" if error.filename else f"the output cannot be written: {reason}",
    )


class _Interrupts:
    """Records whether Ctrl-C was pressed in a ``with`` block of the main thread.

    It records nothing if the application has installed a handler of SIGINT.

    KeyboardInterrupt is raised all the same.
    """

    def __init__(self) -> None:
        self.seen = False
        self.former: Any = None

    def __enter__(self) -> _Interrupts:
        if threading.current_thread() is threading.main_thread():
            self.former = signal.getsignal(signal.SIGINT)
            if self.former is signal.default_int_handler:
                signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self.former is signal.default_int_handler:
            signal.signal(signal.SIGINT, self.former)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        signal.default_int_handler(number, frame)


def _make_streams_safe() -> None:
    """Make output robust: replace characters that the locale lacks, and discard output to closed streams."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 -- for the rest of the process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """Discard unwritten output: Python would fail again when it flushes the output at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _docstring(module: str) -> str:
    """Return the docstring of a module, without importing it."""
    text = Path(__file__).parent.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(text)) or ""


def _what_to_install(error: ModuleNotFoundError) -> str:
    return (
        f"{error}: this command needs a package that is not installed. "
        '`pip install "ort-cuda-plugin[cpu]"` installs it, or `[cuda]` or `[gpu]` for GPUs'
    )
