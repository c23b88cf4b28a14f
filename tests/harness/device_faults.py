"""Injects faults into the emulated devices of this process; docs/architecture/emulated_device.md lists them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ort_cuda_plugin.abi.emulation import configuration, configure


@contextmanager
def faults(text: str) -> Iterator[None]:
    """Within the block, the emulated devices have the faults of ``text``. Other settings and sessions are kept."""
    config = configuration()
    config.faults = text.encode()
    configure(config)
    try:
        yield
    finally:
        config.faults = b""
        configure(config)
