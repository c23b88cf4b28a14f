"""The choice of a device, for commands that work without optional packages."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

import ort_cuda_plugin
from ort_cuda_plugin.cli.exit_codes import ExitCode, UserError

DEVICES = ("auto", "cuda", "emulated")


def add_device_argument(
    parser: argparse.ArgumentParser,
    default: str | None = "auto",
    help_text: str = "auto: a GPU if the machine has one, else the emulated device",
) -> None:
    """Add ``--device`` and its short form ``--emulate``."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--device",
        choices=DEVICES,
        default=default,
        help=help_text,
    )
    add_emulate_argument(group)


def add_emulate_argument(group: argparse._MutuallyExclusiveGroup) -> None:
    """Add ``--emulate``, for a command that has ``--device`` in the same group."""
    group.add_argument(
        "--emulate",
        dest="device",
        action="store_const",
        const="emulated",
        default=argparse.SUPPRESS,
        help="use the emulated device, as --device emulated does",
    )


def find_device(choice: str) -> bool:
    """Return whether ``choice`` on this machine means the emulated device.

    Raises UserError if the choice is "cuda" and there is no GPU, or if the installation is unusable.
    """
    with unavailable_as_user_error():
        from ort_cuda_plugin.ep.device.devices import cuda_devices

        found, why = ([], "") if choice == "emulated" else cuda_devices()
        if choice == "cuda" and not found:
            raise UserError(ExitCode.UNAVAILABLE, f"no CUDA device: {why}. Use the emulated device: --device emulated")
        return not found


def select_device(choice: str) -> bool:
    """Register the plugin, and return whether to use the emulated device. Raises the errors of `find_device`."""
    emulate = find_device(choice)
    with unavailable_as_user_error():
        ort_cuda_plugin.register(emulate=emulate)
    return emulate


@contextmanager
def unavailable_as_user_error() -> Iterator[None]:
    """Raise UserError for any error of an unusable installation or environment variable."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # ONNX Runtime raises errors of its own types
        raise UserError(ExitCode.UNAVAILABLE, str(error)) from error
