"""Run a program that asks for CUDAExecutionProvider, unchanged, on the plugin.

`ort-cuda-plugin exec -- python app.py` starts the program so that each of its Python processes registers the plugin
under the built-in execution provider's name when it imports onnxruntime. It needs the wheel without CUDA. At its end
each process prints which providers its sessions asked for, where their nodes ran, and why.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from ort_cuda_plugin import drop_in
from ort_cuda_plugin.cli.devices import add_device_argument, find_device, unavailable_as_user_error
from ort_cuda_plugin.cli.exit_codes import ExitCode, UserError
from ort_cuda_plugin.ep.device.devices import EMULATE_VARIABLE
from ort_cuda_plugin.ep.device.identity import AS_VARIABLE, Identity

_DEVICE_HELP = (
    "cuda: a GPU (the default). emulated: the emulated device, which is slow; the default if the environment variable "
    "ORT_CUDA_PLUGIN_EMULATE is 1. auto: a GPU if the machine has one, else the emulated device"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_device_argument(parser, default=None, help_text=_DEVICE_HELP)
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="-- PROGRAM ARGUMENTS", help="the program and its arguments"
    )


def execute(arguments: argparse.Namespace) -> int:
    """Replace this process by the program."""
    return start(arguments, Identity.CUDA)


def start(arguments: argparse.Namespace, identity: Identity) -> int:
    """Replace this process by the program, and register the plugin there under the name of ``identity``."""
    program = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if not program:
        raise UserError(
            ExitCode.USAGE,
            f"the program to run is missing. Add it as in: ort-cuda-plugin {arguments.command} -- python app.py",
        )
    if shutil.which(program[0]) is None:
        raise UserError(ExitCode.USAGE, f"program {program[0]!r}: not found in PATH. Give the path of a program")
    environment = program_environment(find_device(arguments.device or _default_device()), identity)
    try:
        os.execvpe(program[0], program, environment)
    except OSError as error:
        raise UserError(ExitCode.USAGE, f"{program[0]!r} cannot be run: {error.strerror}") from error


def _default_device() -> str:
    with unavailable_as_user_error():
        from ort_cuda_plugin.abi.flags import flag_variable

        return "emulated" if flag_variable(EMULATE_VARIABLE) else "cuda"


def program_environment(emulate: bool, identity: Identity) -> dict[str, str]:
    """Return this process's environment, extended so that Python processes register the plugin."""
    folder = str(Path(drop_in.__file__).resolve().parent)
    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry not in ("", folder)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([folder, *inherited]),
        AS_VARIABLE: identity.ep_name,
        EMULATE_VARIABLE: "1" if emulate else "0",
    }
