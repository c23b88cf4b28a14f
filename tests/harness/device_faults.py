"""Faults of the emulated devices of this process; docs/architecture/emulated_device.md lists the settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ort_cuda_plugin.abi.emulation import configuration, configure


@contextmanager
def faults(text: str) -> Iterator[None]:
    """The emulated devices with faults, which other settings and sessions outlive."""
    config = configuration()
    config.faults = text.encode()
    configure(config)
    try:
        yield
    finally:
        config.faults = b""
        configure(config)
