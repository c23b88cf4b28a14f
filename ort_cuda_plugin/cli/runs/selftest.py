"""Check the kernels, library calls and driver features of a device, and quarantine what fails.

Each result is compared with that of a reference. Later sessions avoid what is quarantined, until a selftest passes, or
the driver, a library or the plugin has another version. The exit code is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import json
import sys

from rich.console import Console

from ort_cuda_plugin.abi.message_texts import printable
from ort_cuda_plugin.cli.common import output_file
from ort_cuda_plugin.cli.devices import DEVICES, add_emulate_argument, find_device
from ort_cuda_plugin.cli.exit_codes import ExitCode, UserError
from ort_cuda_plugin.selftest.device import Device
from ort_cuda_plugin.selftest.report import json_report, table
from ort_cuda_plugin.selftest.runner import Runner, WorkerDied
from ort_cuda_plugin.selftest.selftest import lift, selftest
from ort_cuda_plugin.selftest.table import SECTIONS

NAMES = tuple(section.name for section in SECTIONS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--device",
        default="auto",
        metavar="DEVICE",
        help="the number of a GPU, cuda, emulated, or auto: a GPU if the machine has one, else the emulated device",
    )
    add_emulate_argument(group)
    parser.add_argument("--quick", action="store_true", help="check fewer sizes and types, in less than a minute")
    parser.add_argument("--sections", nargs="+", choices=NAMES, default=NAMES, metavar="SECTION", help=", ".join(NAMES))
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the report as JSON")
    parser.add_argument(
        "--no-quarantine",
        action="store_true",
        help="do not change which kernels sessions on this device avoid (the quarantine)",
    )
    parser.add_argument(
        "--clear",
        action="store_true",
        help="let sessions on this device use all kernels again (lift the quarantine), and check nothing",
    )


def execute(arguments: argparse.Namespace) -> int:
    device = _device(arguments.device)
    console = Console(stderr=True)
    try:
        if arguments.clear:
            for entry in lift(device):
                print(printable(f"no longer quarantined: {entry}"))
            return ExitCode.OK
        with console.status("selftest") as status:
            runner = Runner(device, lambda text: status.update(printable(text)) if console.is_terminal else None)
            try:
                report = selftest(runner, arguments.sections, arguments.quick, stores=not arguments.no_quarantine)
            finally:
                runner.close()
    except (WorkerDied, RuntimeError) as error:
        raise UserError(ExitCode.UNAVAILABLE, f"the device cannot be tested: {error}") from error
    if arguments.json:
        arguments.json.write_text(json.dumps(json_report(report), indent=1), encoding="utf-8")
    for line in table(report):
        print(printable(line))
    sys.stdout.flush()
    return ExitCode.MISMATCH if report.has_failed else ExitCode.OK


def _device(text: str) -> Device:
    """Return the device that the argument names. Raises UserError for a text that names none."""
    if text.isdecimal():
        find_device("cuda")
        return Device(False, int(text))
    if text not in DEVICES:
        names = ", ".join(DEVICES)
        raise UserError(ExitCode.USAGE, f"--device: got {text!r}, expected the ordinal of a GPU, or one of {names}")
    return Device(find_device(text))
