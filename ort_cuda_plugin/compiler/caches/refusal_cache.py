"""The disk cache of library calls that a device's libraries have refused.

Entries are in the folder ``refusals`` of the kernel cache, one for each device with its driver and libraries. They
contain only numbers: a wrong entry can at worst select one of the plugin's kernels where a library is faster.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path

from ort_cuda_plugin.compiler.caches.cache_folder import CacheFolder, cache_folder

max_cache_bytes = 1 << 20
max_refusals = 1024
"""Maximum number of refused calls that are stored for a device; the oldest are dropped."""


class RefusalCache(CacheFolder):
    """Refused library calls, each a tuple of integers, by the text that identifies a device.

    Several processes may share one folder. If two processes write at the same time, the refusals of one may be lost.
    """

    name = "cache of refused library calls"
    suffix = ".refusals"
    magic = b"OCPR\x01\n"
    consequence = "Each process tries calls again that cuBLASLt or cuDNN has refused before"
    remedy = "the process tries the library call again"
    max_entry_bytes = 256 << 10

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__(cache_folder() / "refusals" if folder is None else folder, max_cache_bytes)

    def load(self, device: str) -> list[tuple[int, ...]]:
        """Return the refused calls of a device, the oldest first; empty if the entry is missing or damaged."""
        try:
            found, calls = json.loads(self.read(_key(device)) or b"[null, []]")
            is_valid = found == device and all(type(number) is int for call in calls for number in call)
            return [tuple(call) for call in calls if len(call) >= 4] if is_valid else []
        except (ValueError, TypeError, RecursionError):
            return []

    def keep(self, device: str, refusal: tuple[int, ...]) -> None:
        """Store a refused call of a device."""
        known = [call for call in self.load(device) if call != refusal]
        self.write(_key(device), json.dumps([device, [*known, refusal][-max_refusals:]]).encode())


def _key(device: str) -> str:
    return hashlib.sha256(device.encode()).hexdigest()


@lru_cache(maxsize=4)
def _cache_in(folder: Path) -> RefusalCache:
    return RefusalCache(folder)


def refusal_cache() -> RefusalCache:
    """Return this process's cache of refused calls, in the folder ``refusals`` of `cache_folder`."""
    return _cache_in(cache_folder() / "refusals")
