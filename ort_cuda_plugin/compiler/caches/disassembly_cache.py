"""Disk cache of disassembled kernels: nvdisasm takes about half a second for each kernel, even for small ones.

Entries are in the folder ``disassembly`` of the kernel cache. An entry is the text of a kernel's machine instructions,
which estimates count.
"""

from __future__ import annotations

import hashlib
import zlib
from functools import lru_cache
from pathlib import Path

from ort_cuda_plugin.compiler.caches.cache_folder import CacheFolder, cache_folder

max_cache_bytes = 64 << 20
max_text_bytes = 64 << 20


class DisassemblyCache(CacheFolder):
    """Texts of nvdisasm, by cubin and tool. Several processes may share one folder."""

    name = "cache of disassembled kernels"
    suffix = ".sass"
    magic = b"OCDA\x01\n"
    consequence = "Each estimate disassembles its kernels again"
    remedy = "the estimate disassembles the kernel again"
    max_entry_bytes = 8 << 20

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__(cache_folder() / "disassembly" if folder is None else folder, max_cache_bytes)

    def load(self, cubin: bytes, tool: Path) -> str | None:
        """Return the text of a cubin by this nvdisasm; None if there is no entry, or if it is damaged."""
        body = self.read(_key(cubin, tool))
        if body is None:
            return None
        try:
            reader = zlib.decompressobj()
            text = reader.decompress(body, max_text_bytes)
            return text.decode() if reader.eof else None
        except (zlib.error, UnicodeDecodeError):
            return None

    def keep(self, cubin: bytes, tool: Path, text: str) -> None:
        """Store the text of a cubin."""
        self.write(_key(cubin, tool), zlib.compress(text.encode()))


def _key(cubin: bytes, tool: Path) -> str:
    status = tool.stat()
    return hashlib.sha256(f"{status.st_size} {status.st_mtime_ns} ".encode() + cubin).hexdigest()


@lru_cache(maxsize=4)
def _cache_in(folder: Path) -> DisassemblyCache:
    return DisassemblyCache(folder)


def disassembly_cache() -> DisassemblyCache:
    """Return this process's cache of disassembled kernels, in the folder ``disassembly`` of `cache_folder`."""
    return _cache_in(cache_folder() / "disassembly")
