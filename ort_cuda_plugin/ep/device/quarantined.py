"""The quarantine of a device: schedules and operators that failed the selftest with its driver, libraries and code."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict

from ...clusters.tuning import kernels_digest
from ...compiler.caches.quarantine_cache import quarantine_cache
from ...compiler.toolchain import host_cpu, joined_digest
from ...program.steps.quarantine import Quarantine, Quarantined, QuarantinedOperator, QuarantinedSchedule
from .open_device import OpenDevice
from .thread_value import ThreadValue

_ignores = ThreadValue(False)


def without_quarantine() -> AbstractContextManager[None]:
    """Let sessions that this thread creates in the block use quarantined schedules and operators."""
    return _ignores.replaced_by(True)


def identity_of(device: OpenDevice) -> str:
    """Return the device, its PCI address, driver and libraries as text; a quarantine is valid for this text only.

    The emulated device is identified by the processor, and by the GPU whose kernels it runs.
    """
    if device.info.emulated:
        return f"{device.identity}, CPU {joined_digest(host_cpu())[:16]}, kernels {device.target.arch}"
    return f"{device.identity}, {device.info.pci_bus_id}"


def load(device: OpenDevice) -> Quarantine:
    """Return the device's quarantine as it is now; inside `without_quarantine` an empty one."""
    if _ignores.value:
        return Quarantine()
    return load_by(identity_of(device))


def load_by(identity: str) -> Quarantine:
    """Return the quarantine of the device for which `identity_of` returned ``identity``."""
    cache = quarantine_cache()
    if not cache.has(identity):
        return Quarantine()
    found = (_entry(dict(data)) for data in cache.load(identity, kernels_digest()))
    return Quarantine(tuple(entry for entry in found if entry is not None))


def store(identity: str, entries: Sequence[Quarantined]) -> bool:
    """Replace a device's quarantine on disk by ``entries``; return whether later processes will find it."""
    kinds = {QuarantinedSchedule: "schedule", QuarantinedOperator: "operator"}
    data = [{"kind": kinds[type(entry)], **asdict(entry), "reason": entry.reason[:500]} for entry in entries]
    return quarantine_cache().store(identity, kernels_digest(), data)


def _entry(data: dict[str, str]) -> Quarantined | None:
    kind = {"schedule": QuarantinedSchedule, "operator": QuarantinedOperator}.get(data.pop("kind", ""))
    try:
        return None if kind is None else kind(**data)
    except TypeError:  # another version of the plugin wrote the entry, with other fields
        return None
