"""Calibrations in the timing cache: for a device the seconds of each probe, and the rates that follow from them."""

from __future__ import annotations

from collections.abc import Mapping

from ...gpus import Gpu
from ...gpus.calibration import Calibration, Sizes, derive
from .timing_cache import TimedProblem, timing_cache

VERSION = 1
"""Version of the probes; times of other versions are not read."""


def store_probes(device: str, seconds: Mapping[str, float]) -> None:
    """Keep the median seconds of probes for ``device``, a text of `device_identity`."""
    timing_cache().record(_problem(device), seconds)


def stored_calibration(device: str, gpu: Gpu, sizes: Sizes) -> Calibration | None:
    """Return the rates of a calibrated device; None if it was never calibrated, or if a rate is not plausible."""
    seconds = timing_cache().times(_problem(device))
    return derive(gpu, sizes, seconds) if seconds else None


def _problem(device: str) -> TimedProblem:
    return TimedProblem.of(f"calibration {VERSION}", device, (), ())
