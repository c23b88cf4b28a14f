"""Tests whether a device and a driver can run a cubin."""

from __future__ import annotations

import re


def runs_on(arch: str, compute_capability: tuple[int, int]) -> bool:
    """Return whether a device runs a cubin for ``arch``: same major version, and a minor version that is not newer."""
    match = re.fullmatch(r"sm_(\d+)(\d)", arch)
    return match is not None and (int(match[1]), int(match[2])) <= compute_capability < (int(match[1]) + 1,)


def driver_runs(toolkit: str, driver: str) -> bool:
    """Return whether a driver runs a toolkit's code: the toolkit's major version must not be newer than the driver's.

    True if a version is unknown.
    """
    return not toolkit or not driver or _major(toolkit) <= _major(driver)


def _major(version: str) -> int:
    match = re.match(r"\d{1,4}", version)
    return int(match[0]) if match else 0
