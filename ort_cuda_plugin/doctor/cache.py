"""Findings about the kernel cache: whether it is used, persistent, and intact."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from ..compiler.cache import KernelCache
from ..compiler.caches.cache_folder import CACHE_DIR_VARIABLE
from .findings import Finding, ok, problem, warning

_SUBJECT = "kernel cache"


def cache_findings(cache: KernelCache) -> Iterator[Finding]:
    """Read every entry of the cache, and report what is wrong."""
    if cache.opened is None or not cache.usable:
        yield problem(
            _SUBJECT,
            f"{cache.folder} is not used: {cache.problem}. Each process compiles its kernels again",
            f"set {CACHE_DIR_VARIABLE} to a folder that this user owns and no other user can write to",
        )
        return
    files = list(cache.opened.files())
    entries = [(name, status) for name, status in files if name.endswith(cache.suffix)]
    size = sum(status.st_size for _, status in entries)
    text = f"{cache.folder}: {len(entries)} entries, {size / 2**20:.1f} of at most {cache.max_bytes / 2**20:.0f} MiB"
    if cache.opened.is_writable:
        yield ok(_SUBJECT, text)
    else:
        yield warning(
            _SUBJECT,
            f"{text}. This user may read the folder, but not write to it",
            "a read-only cache is right for a container image with a warm cache. Otherwise each process compiles the "
            f"missing kernels: set {CACHE_DIR_VARIABLE} to a writable folder",
        )
    damaged = [name for name, _ in entries if not cache.is_whole(name)]
    if damaged:
        yield problem(
            "entries of the cache",
            f"{len(damaged)} of {len(entries)} are damaged or belong to another user: {', '.join(damaged[:3])}"
            + (", ..." if len(damaged) > 3 else ""),
            f"remove them from {cache.folder}; the kernels will be compiled again",
            *(f"rm -f {shlex.quote(str(cache.folder / name))}" for name in damaged),
        )
    partial = [name for name, _ in files if name.endswith(".part")]
    if len(partial) > 10:
        yield warning(
            "partial files of the cache",
            f"{len(partial)} files are incomplete, because the processes that wrote them ended early",
            f"remove {cache.folder}/*.part while no process compiles",
            f"rm -f {shlex.quote(str(cache.folder))}/*.part",
        )
