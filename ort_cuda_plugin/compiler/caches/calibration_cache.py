"""Calibration in the timing cache: the seconds that a device took for each probe kernel, and the rates derived from
them.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...gpus import Gpu
from ...gpus.calibration import Calibration, Sizes, derive
from .timing_cache import TimedProblem, timing_cache

VERSION = 1
"""Version of the probes. Times that were measured with probes of another version are ignored."""


def store_probes(device: str, seconds: Mapping[str, float]) -> None:
    """Store the median seconds of each probe for ``device``, a text from `device_identity`."""
    timing_cache().record(_problem(device), seconds)


def stored_calibration(device: str, gpu: Gpu, sizes: Sizes) -> Calibration | None:
    """Return the measured rates of ``device``; None if it was never calibrated, or if a rate is not plausible."""
    seconds = timing_cache().times(_problem(device))
    return derive(gpu, sizes, seconds) if seconds else None


def _problem(device: str) -> TimedProblem:
    return TimedProblem.of(f"calibration {VERSION}", device, (), ())
