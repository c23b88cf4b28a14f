"""Measure rates of a device, by which sessions choose kernels: launches, memory, arithmetic, GEMMs of libraries.

The rates replace those of the GPU's description until the driver, a library or the plugin has another version. The
first calibration also compiles its kernels, for about ten seconds.
"""

from __future__ import annotations

import argparse
from dataclasses import fields

from rich.table import Table

from ort_cuda_plugin.api import chosen_device, described_by
from ort_cuda_plugin.cli.common import output_console
from ort_cuda_plugin.cli.devices import add_device_argument, find_device
from ort_cuda_plugin.cli.exit_codes import ExitCode, UserError
from ort_cuda_plugin.ep.device.calibrating import calibrate
from ort_cuda_plugin.ep.device.open_device import use_device
from ort_cuda_plugin.gpus.calibration import described


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_device_argument(parser)


def execute(arguments: argparse.Namespace) -> int:
    emulate = find_device(arguments.device)
    try:
        device = use_device(described_by(chosen_device(emulate, {})))
        times = calibrate(device)
    except RuntimeError as error:
        raise UserError(ExitCode.UNAVAILABLE, f"the device cannot be calibrated: {error}") from error
    console = output_console()
    table = Table("probe", title=device.info.name, title_justify="left")
    table.add_column("us", justify="right")
    for name, seconds in times.items():
        table.add_row(name, f"{seconds * 1e6:.2f}")
    console.print(table)
    if device.info.emulated:
        console.print("Times of the emulated device say nothing about a GPU: sessions ignore them.")
        return ExitCode.OK
    found, known = device.calibration, described(device.described)
    if found is None:
        console.print(
            "Sessions will not use the measured rates: a measurement is missing, or a rate is not plausible. Repeat the"
            " command while nothing else uses the GPU."
        )
        return ExitCode.MISMATCH
    rates = Table("rate", title="rates of the performance model", title_justify="left")
    for name in ("described", "measured"):
        rates.add_column(name, justify="right")
    for field in fields(found):
        rates.add_row(field.name, *(f"{getattr(each, field.name):.3g}" for each in (known, found)))
    console.print(rates)
    return ExitCode.OK
