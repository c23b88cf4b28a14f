"""Settings of this process's emulated devices, and the findings of their checking mode."""

from __future__ import annotations

from typing import Any

from .core import core, ffi

_TEXT_BYTES = 500
"""Size in bytes of the buffer for a finding, or for the reason why the emulator rejects settings."""


def configuration() -> Any:
    """Return a copy of the settings, an ``ocp_emu_config *``; see ``csrc_shim/emulator/config.h``."""
    config = ffi.new("ocp_emu_config *")
    core().emu_get_config(config)
    return config


def configure(config: Any) -> None:
    """Change the settings. Raises ValueError with the reason if the library refuses them."""
    text = ffi.new("char[]", _TEXT_BYTES)
    if core().emu_configure(config, text, len(text)):
        raise ValueError(ffi.string(text).decode())


def findings() -> list[str]:
    """Return the findings of the checking mode since `clear_findings`, one line each."""
    text = ffi.new("char[]", _TEXT_BYTES)
    found = []
    for index in range(core().emu_num_findings()):
        core().emu_finding(index, text, len(text))
        found.append(ffi.string(text).decode())
    return found


def clear_findings() -> None:
    """Clear the findings, and the sticky errors that make a device unusable."""
    core().emu_clear_findings()
