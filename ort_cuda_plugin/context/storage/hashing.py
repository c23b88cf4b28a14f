"""Tree hash of an array in a context: a hash of the hashes of blocks, which several threads can compute."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from ...model.open_file import OpenFile
from .files import Buffer

PIECE = 1 << 22
"""Size of a block that is hashed separately, in bytes."""
MAX_THREADS = 8
T = TypeVar("T")
R = TypeVar("R")


def array_digest(data: Buffer) -> bytes:
    """Return the SHA-256 of the SHA-256s of ``data``'s blocks of `PIECE` bytes; the last block may be shorter."""
    view = memoryview(data)

    def digest(start: int) -> bytes:
        return hashlib.sha256(view[start : start + PIECE]).digest()

    return hashlib.sha256(b"".join(in_threads(digest, range(0, len(view), PIECE), len(view)))).digest()


def read_array(file: OpenFile, offset: int, length: int) -> tuple[memoryview, bytes]:
    """Read bytes of a file into new memory, and return them with their `array_digest`. Raises OSError."""
    data = np.empty(length, np.uint8).data

    def read(start: int) -> bytes:
        piece = data[start : start + PIECE]
        file.read_into(piece, offset + start)
        return hashlib.sha256(piece).digest()

    return data, hashlib.sha256(b"".join(in_threads(read, range(0, length, PIECE), length))).digest()


def file_digest(file: OpenFile, offset: int, length: int) -> bytes:
    """Return the `array_digest` of bytes of a file, with few blocks in memory at once. Raises OSError."""

    def digest(piece: tuple[int, int]) -> bytes:
        start, size = piece
        return hashlib.sha256(file.read(offset + start, size)).digest()

    return hashlib.sha256(b"".join(in_threads(digest, in_pieces(length), length))).digest()


def in_pieces(length: int) -> Iterator[tuple[int, int]]:
    """Divide ``length`` bytes into blocks of `PIECE` bytes; yield the offset and the size of each block."""
    return ((start, min(PIECE, length - start)) for start in range(0, length, PIECE))


def in_threads(function: Callable[[T], R], items: Iterable[T], nbytes: int) -> list[R]:
    """Return ``function(item)`` for all items; several threads call it if ``nbytes`` fill at least two blocks.

    Threads save time only if ``function`` releases the GIL. Raises the exception of ``function``, once no call is in
    progress.
    """
    threads = min(_cores(), MAX_THREADS, nbytes // PIECE)
    if threads < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, items))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
