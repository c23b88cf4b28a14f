"""Calibrates a device: times the probes (micro-benchmarks of `clusters.probes`), and stores their times on disk."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ...clusters.cluster import Variant
from ...clusters.probes import probes
from ...compiler.caches.calibration_cache import store_probes
from .measuring import measure
from .open_device import OpenDevice

Measure = Callable[[OpenDevice, Sequence[Variant]], Sequence[float | None]]


def calibrate(device: OpenDevice, measured: Measure = measure) -> dict[str, float]:
    """Measure all probes on a device, store their median seconds for later sessions, and return them by probe name.

    Probes that fail are left out. Sessions that exist keep their rates. Times of the emulated device are not stored.
    """
    programs = probes(device.properties(), device.probe_sizes)
    found = measured(device, list(programs.values()))
    times = {name: each for name, each in zip(programs, found, strict=True) if each is not None and 0 < each < math.inf}
    if not device.info.emulated:
        store_probes(device.probed, times)
        device.forget_calibration()
    return times
