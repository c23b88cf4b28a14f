"""The command line: ``ort-cuda-plugin`` and ``python -m ort_cuda_plugin``. One module per command.

A command module has ``add_arguments(parser)`` and ``execute(arguments) -> int``, the exit code. Only the module of the
command that was asked for is imported: some need packages that others do without.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import ort_cuda_plugin
from ort_cuda_plugin.cli.exit_codes import ExitCode, UserError

COMMANDS = {
    "run": "run",
    "profile": "profile",
    "bench": "bench",
    "compare": "compare",
    "exec": "drop_in",
    "with": "with_plugin",
    "info": "info",
    "doctor": "doctor",
    "explain": "explain",
    "estimate": "estimate",
    "compile": "compile_model",
    "inspect": "inspect_context",
    "kernels": "kernels",
    "conformance": "conformance",
    "operators": "operators",
    "parity": "parity",
}
"""The command's name and that of its module."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; see `ExitCode`."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="ort-cuda-plugin",
        description="Runs ONNX models on NVIDIA GPUs or an emulated one, as an ONNX Runtime plugin.",
        epilog="exit codes: " + ", ".join(f"{code.value} {code.meaning}" for code in ExitCode),
    )
    parser.add_argument("--version", action="version", version=f"ort-cuda-plugin {ort_cuda_plugin.__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = words[0] if words else ""
    for name, module in COMMANDS.items():
        description = _docstring(module)
        command = subparsers.add_parser(name, help=description.splitlines()[0], description=description)
        if name == chosen:
            try:
                implementation = importlib.import_module(f"{__name__}.{module}")
            except ModuleNotFoundError as error:
                print(f"ort-cuda-plugin {name}: {_what_to_install(error)}", file=sys.stderr)
                return int(ExitCode.UNAVAILABLE)
            implementation.add_arguments(command)
    arguments = parser.parse_args(words)
    try:
        code = int(implementation.execute(arguments))
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"ort-cuda-plugin {arguments.command}: {error}", file=sys.stderr)
        return int(error.code)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # The reader has seen enough, as `head` does. Python would fail once more when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.OUTPUT_CLOSED)


def _docstring(module: str) -> str:
    """What a module says of itself, without importing it."""
    text = Path(__file__).with_name(f"{module}.py").read_text()
    return ast.get_docstring(ast.parse(text)) or ""


def _what_to_install(error: ModuleNotFoundError) -> str:
    return (
        f'{error}: this command needs more than the package itself. `pip install "ort-cuda-plugin[cpu]"` brings it, '
        "or `[cuda]` or `[gpu]` for GPUs"
    )
