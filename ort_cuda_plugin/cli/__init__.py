"""The command line: ``ort-cuda-plugin`` and ``python -m ort_cuda_plugin``. One module per command.

A command module has ``add_arguments(parser)`` and ``execute(arguments) -> int``, the exit code.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from types import ModuleType

from ort_cuda_plugin.cli import (
    bench,
    compile_model,
    conformance,
    doctor,
    drop_in,
    estimate,
    explain,
    info,
    inspect_context,
    kernels,
    operators,
    parity,
    profile,
    run,
)
from ort_cuda_plugin.cli.exit_codes import ExitCode, UserError

COMMANDS: dict[str, ModuleType] = {
    "run": run,
    "profile": profile,
    "bench": bench,
    "exec": drop_in,
    "info": info,
    "doctor": doctor,
    "explain": explain,
    "estimate": estimate,
    "compile": compile_model,
    "inspect": inspect_context,
    "kernels": kernels,
    "conformance": conformance,
    "operators": operators,
    "parity": parity,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; see `ExitCode`."""
    parser = argparse.ArgumentParser(
        prog="ort-cuda-plugin",
        description="Runs ONNX models on NVIDIA GPUs or an emulated one, as an ONNX Runtime plugin.",
        epilog="exit codes: " + ", ".join(f"{code.value} {code.meaning}" for code in ExitCode),
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").splitlines()[0]
        module.add_arguments(subparsers.add_parser(name, help=summary, description=module.__doc__))
    arguments = parser.parse_args(argv)
    try:
        return int(COMMANDS[arguments.command].execute(arguments))
    except UserError as error:
        print(f"ort-cuda-plugin {arguments.command}: {error}", file=sys.stderr)
        return int(error.code)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)
