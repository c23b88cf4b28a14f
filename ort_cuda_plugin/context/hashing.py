"""The hash of an array in a context: of pieces, so that several threads can compute it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from ..model.open_file import OpenFile
from .files import Buffer

PIECE = 1 << 22
"""Bytes."""
MAX_THREADS = 8
T = TypeVar("T")
R = TypeVar("R")


def array_digest(data: Buffer) -> bytes:
    """The SHA-256 of the SHA-256s of the pieces of `PIECE` bytes of ``data``, of which the last may be shorter."""
    view = memoryview(data)

    def digest(start: int) -> bytes:
        return hashlib.sha256(view[start : start + PIECE]).digest()

    return hashlib.sha256(b"".join(in_threads(digest, range(0, len(view), PIECE), len(view)))).digest()


def read_array(file: OpenFile, offset: int, length: int) -> tuple[memoryview, bytes]:
    """Bytes of a file, in memory of their own, and their hash as `array_digest` has it. Raises OSError."""
    data = np.empty(length, np.uint8).data

    def read(start: int) -> bytes:
        piece = data[start : start + PIECE]
        file.read_into(piece, offset + start)
        return hashlib.sha256(piece).digest()

    return data, hashlib.sha256(b"".join(in_threads(read, range(0, length, PIECE), length))).digest()


def file_digest(file: OpenFile, offset: int, length: int) -> bytes:
    """The hash of bytes of a file, of which no more than a few pieces are in memory at once. Raises OSError."""

    def digest(piece: tuple[int, int]) -> bytes:
        start, size = piece
        return hashlib.sha256(file.read(offset + start, size)).digest()

    return hashlib.sha256(b"".join(in_threads(digest, in_pieces(length), length))).digest()


def in_pieces(length: int) -> Iterator[tuple[int, int]]:
    """Where the pieces of so many bytes begin, and how long they are."""
    return ((start, min(PIECE, length - start)) for start in range(0, length, PIECE))


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
