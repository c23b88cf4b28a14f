"""Findings about each device's quarantine: the schedules and operators that failed the selftest."""

from __future__ import annotations

from collections.abc import Iterator

from ..ep.device.devices import DeviceInfo
from ..ep.device.open_device import use_device
from ..ep.device.quarantined import identity_of, load_by
from ..program.steps.quarantine import Quarantine
from .findings import Finding, warning

MAX_NAMES = 5
"""Maximum number of quarantined entries that a finding names."""


def quarantine_findings(devices: list[DeviceInfo]) -> Iterator[Finding]:
    """Warn about each device with a quarantine. A device that cannot be opened has no finding here."""
    for info in devices:
        try:
            quarantine = load_by(identity_of(use_device(info)))
        except Exception:  # other findings say why the device does not work
            continue
        yield from of_device(info, quarantine)


def of_device(info: DeviceInfo, quarantine: Quarantine) -> Iterator[Finding]:
    """Warn about the quarantine of a device, if anything is quarantined."""
    names = [str(entry) for entry in quarantine.entries]
    if names:
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        yield warning(
            f"quarantine of {info.name}",
            f"failed `ort-cuda-plugin selftest`, so sessions do not use it: {', '.join(names[:MAX_NAMES])}{more}",
            "update the driver, the libraries or the plugin, and run `ort-cuda-plugin selftest` again: kernels "
            "that pass will be used again. Report the failed checks",
        )
