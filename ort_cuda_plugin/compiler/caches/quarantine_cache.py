"""The disk cache of schedules and operators that failed the selftest on a device.

Entries are in the folder ``quarantine`` of the kernel cache, one for each device with its driver and libraries. They
contain only names: a wrong entry can at worst keep a node from the plugin, or select another of its kernels.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from ort_cuda_plugin.compiler.caches.cache_folder import CacheFolder, cache_folder

logger = logging.getLogger("ort_cuda_plugin")

Entry = dict[str, str]

max_cache_bytes = 4 << 20
max_entries = 4096
max_text_characters = 1024


class QuarantineCache(CacheFolder):
    """Quarantined schedules and operators, by the text that identifies a device.

    ``made_by`` identifies the kernels that were tested: an entry is void for other kernels. Several processes may share
    one folder.
    """

    name = "quarantine"
    suffix = ".quarantine"
    magic = b"OCPQ\x01\n"
    consequence = "Kernels that failed `ort-cuda-plugin selftest` are used"
    remedy = "sessions use kernels that failed, until `ort-cuda-plugin selftest` runs again"
    max_entry_bytes = 1 << 20

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__(cache_folder() / "quarantine" if folder is None else folder, max_cache_bytes)
        self._told: set[str] = set()

    def has(self, device: str) -> bool:
        """Return whether the device has an entry, readable or not."""
        return self.opened is not None and self.path(_key(device)).exists()

    def load(self, device: str, made_by: str) -> list[Entry]:
        """Return the device's quarantined schedules and operators. If the entry is damaged, log a warning and return
        an empty list.
        """
        key = _key(device)
        if not self.has(device):
            return []
        body = self.read(key)
        try:
            identity, kernels, entries = json.loads(body or b"")
            is_whole = identity == device and isinstance(kernels, str) and _are_entries(entries)
        except (ValueError, TypeError, RecursionError):
            is_whole = False
        if not is_whole:
            if key not in self._told:  # warn once per process
                logger.warning("%s entry %s is damaged: %s", self.name, self.path(key), self.remedy)
            self._told.add(key)
            return []
        return list(entries) if kernels == made_by else []

    def store(self, device: str, made_by: str, entries: Sequence[Entry]) -> bool:
        """Replace the device's entry; return whether a later process will find it."""
        if not entries:
            return self.clear(device)
        data = json.dumps([device, made_by, [*entries][:max_entries]]).encode()
        self.write(_key(device), data)
        return self.load(device, made_by) == [*entries]

    def clear(self, device: str) -> bool:
        """Remove the device's entry; return whether none is left."""
        if self.opened is not None:
            with contextlib.suppress(OSError):
                self.opened.remove(self.file_name(_key(device)))
        return not self.has(device)


def _are_entries(entries: object) -> bool:
    if not isinstance(entries, list) or len(entries) > max_entries:
        return False
    texts = [text for entry in entries for text in (entry.items() if isinstance(entry, dict) else [None])]
    return all(
        pair is not None and all(isinstance(text, str) and len(text) <= max_text_characters for text in pair)
        for pair in texts
    )


def _key(device: str) -> str:
    return hashlib.sha256(device.encode()).hexdigest()


@lru_cache(maxsize=4)
def _cache_in(folder: Path) -> QuarantineCache:
    return QuarantineCache(folder)


def quarantine_cache() -> QuarantineCache:
    """Return this process's quarantine cache, in the folder ``quarantine`` of `cache_folder`."""
    return _cache_in(cache_folder() / "quarantine")
