"""The disk cache of vendor libraries' algorithms, for example cuDNN's execution plans with their compiled kernels.

Entries are in the folder ``plans`` of the kernel cache. They contain code that the library loads into the device. So,
as for kernels, only files that this user or root wrote are loaded.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

from ort_cuda_plugin.compiler.caches.cache_folder import CacheFolder, cache_folder

max_cache_bytes = 256 << 20


class PlanCache(CacheFolder):
    """Library plans by key, a text that describes the problem. Several processes may share one folder.

    ``folder`` defaults to ``plans`` in `cache_folder`. ``max_bytes`` limits the sum of the entries' sizes: the least
    recently used entries are removed.
    """

    name = "cache of library algorithms"
    suffix = ".plan"
    magic = b"OCPL\x01\n"
    consequence = "In each process cuBLASLt and cuDNN choose algorithms again"
    remedy = "the library chooses an algorithm again"
    max_entry_bytes = 8 << 20

    def __init__(self, folder: Path | None = None, max_bytes: int = max_cache_bytes) -> None:
        super().__init__(cache_folder() / "plans" if folder is None else folder, max_bytes)

    def load(self, what: bytes) -> bytes | None:
        """Return the library plan for the problem ``what``; None if there is no entry, or if it is damaged."""
        return self.read(_key(what))

    def keep(self, what: bytes, plan: bytes) -> None:
        """Store the library plan for the problem ``what``."""
        self.write(_key(what), plan)


def _key(what: bytes) -> str:
    return hashlib.sha256(what).hexdigest()


@lru_cache(maxsize=4)
def _cache_in(folder: Path) -> PlanCache:
    return PlanCache(folder)


def plan_cache() -> PlanCache:
    """Return this process's plan cache, in the folder ``plans`` of `cache_folder`."""
    return _cache_in(cache_folder() / "plans")
