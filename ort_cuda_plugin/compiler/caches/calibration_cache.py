"""The disk cache of calibrations: for a GPU with its driver, libraries and plugin, the seconds of each probe.

Entries are in the folder ``calibrations`` of the kernel cache. They contain names and numbers: wrong contents can at
worst select a slow kernel, since `derive` refuses rates that no GPU has.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from ort_cuda_plugin.compiler.caches.cache_folder import CacheFolder, cache_folder

from ...gpus import Gpu
from ...gpus.calibration import Calibration, ProbedDevice, Sizes, derive

VERSION = 2
"""Version of the probes and of the entries; entries of other versions are not read."""

max_cache_bytes = 1 << 20
max_probes = 256
max_text_characters = 512
_MOST_SECONDS = 1e9


class CalibrationCache(CacheFolder):
    """Median seconds of probes by `ProbedDevice`. Several processes may use one folder."""

    name = "calibration cache"
    suffix = ".calibration"
    magic = b"OCPB\x01\n"
    consequence = "Sessions use the packaged rates of GPUs instead of measured ones"
    remedy = "sessions use the packaged rates of the GPU until `ort-cuda-plugin calibrate` has run again"
    max_entry_bytes = 256 << 10

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__(cache_folder() / "calibrations" if folder is None else folder, max_cache_bytes)

    def load(self, device: ProbedDevice) -> dict[str, float]:
        """Return the seconds of a device's probes; empty if the entry is missing or damaged."""
        found = _decode(self.read(_key(device)) or b"")
        return found[1] if found is not None and found[0] == device else {}

    def store(self, device: ProbedDevice, seconds: Mapping[str, float]) -> None:
        """Replace the seconds of a device's probes. Raises ValueError for a time that no probe takes."""
        for name, taken in seconds.items():
            if not _is_time(taken):
                raise ValueError(f"probe {name!r}: expected a time above 0 s, got {taken!r}")
        self.write(_key(device), json.dumps([VERSION, *_parts(device), dict(seconds)]).encode())

    def all(self) -> list[ProbedDevice]:
        """Return the devices that have an entry, the latest calibrated first."""
        if self.opened is None or not self.usable:
            return []
        files = [(status.st_mtime_ns, name) for name, status in self.opened.files() if name.endswith(self.suffix)]
        bodies = (self.read(name.removesuffix(self.suffix)) for _, name in sorted(files, reverse=True))
        found = (_decode(body or b"") for body in bodies)
        return [each[0] for each in found if each is not None]


def _parts(device: ProbedDevice) -> list[object]:
    return [device.name, list(device.compute_capability), device.multiprocessors, dict(device.versions)]


def _key(device: ProbedDevice) -> str:
    return hashlib.sha256(json.dumps(_parts(device)).encode()).hexdigest()


def _decode(body: bytes) -> tuple[ProbedDevice, dict[str, float]] | None:
    """Decode an entry; None if it is malformed or of another version."""
    try:
        version, name, (major, minor), multiprocessors, versions, seconds = json.loads(body)
        numbers = (major, minor, multiprocessors)
        texts = (name, *versions, *versions.values(), *seconds)
        is_valid = (
            version == VERSION
            and len(seconds) <= max_probes
            and all(type(number) is int and 0 <= number < 1 << 31 for number in numbers)
            and multiprocessors > 0
            and all(isinstance(text, str) and len(text) <= max_text_characters for text in texts)
            and all(map(_is_time, seconds.values()))
        )
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    return (ProbedDevice.of(name, (major, minor), multiprocessors, versions), seconds) if is_valid else None


def _is_time(seconds: object) -> bool:
    return isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 < seconds < _MOST_SECONDS


@lru_cache(maxsize=4)
def _cache_in(folder: Path) -> CalibrationCache:
    return CalibrationCache(folder)


def calibration_cache() -> CalibrationCache:
    """Return the process's cache, in the folder that the environment names."""
    return _cache_in(cache_folder() / "calibrations")


def store_probes(device: ProbedDevice, seconds: Mapping[str, float]) -> None:
    """Keep the median seconds of a device's probes. Raises ValueError for a time that no probe takes."""
    calibration_cache().store(device, seconds)


def calibrated_devices() -> list[ProbedDevice]:
    """Return the devices whose probes are kept, the latest calibrated first."""
    return calibration_cache().all()


def stored_calibration(device: ProbedDevice) -> Calibration | None:
    """Return the rates of a calibrated device; None if it was never calibrated, or if a rate is not plausible."""
    seconds = calibration_cache().load(device)
    return derive(device.described, Sizes.of(device.described), seconds) if seconds else None


def calibration_of(gpu: Gpu, plugin: str) -> tuple[ProbedDevice, Calibration] | None:
    """Return (device, rates) of the latest calibration of ``gpu`` by version ``plugin`` of the plugin, or None."""
    for device in calibrated_devices():
        if device.described == gpu and device.version("plugin") == plugin:
            found = stored_calibration(device)
            if found is not None:
                return device, found
    return None
