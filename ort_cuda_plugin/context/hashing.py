"""The hash of an array in a context: of pieces, so that several threads can compute it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

PIECE = 1 << 22
"""Bytes."""
MAX_THREADS = 8
T = TypeVar("T")
R = TypeVar("R")


def array_digest(data: bytes | memoryview) -> bytes:
    """The SHA-256 of the SHA-256s of the pieces of `PIECE` bytes of ``data``, of which the last may be shorter."""
    view = memoryview(data)

    def digest(start: int) -> bytes:
        return hashlib.sha256(view[start : start + PIECE]).digest()

    return hashlib.sha256(b"".join(in_threads(digest, range(0, len(view), PIECE), len(view)))).digest()


def in_threads(function: Callable[[T], R], items: Iterable[T], nbytes: int) -> list[R]:
    """The results for all items. Where they stand for much data, threads share the work: it must not hold the GIL.

    Raises what ``function`` raises, when no call is at work any more.
    """
    threads = min(_cores(), MAX_THREADS, nbytes // PIECE)
    if threads < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, items))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
