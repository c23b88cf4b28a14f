"""Files that are read with pread through a handle, never mapped into memory.

If another process truncates a mapped file, reading the mapping ends this process with SIGBUS. pread reports an error
instead, and earlier reads stay valid. The handle also keeps a deleted or replaced file readable.
"""

from __future__ import annotations

import os
import stat
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

_lock: Final = threading.Lock()
_open: Final[weakref.WeakValueDictionary[tuple[int, ...], OpenFile]] = weakref.WeakValueDictionary()


def native_path(path: str) -> str:
    """Return a path that ONNX Runtime gives as UTF-8, in the form that Python's file functions take.

    Both differ if Python's file system encoding is not UTF-8: it is ASCII in an isolated interpreter in the C locale,
    such as that of the Python backend of Triton 24.10.
    """
    return os.fsdecode(path.encode(errors="surrogateescape"))


class FileChanged(OSError):
    """A file was truncated or written while it was read."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{str(path)!r} changed while it was read; files that are in use must not change")


class OpenFile:
    """A regular file of ``len()`` bytes, opened by `open_file`. Thread safe."""

    def __init__(self, path: Path, handle: int, status: os.stat_result) -> None:
        self.path = path
        self.handle = handle
        self._state = _state(status)
        self._size = status.st_size
        self._closed = weakref.finalize(self, os.close, handle)

    def __len__(self) -> int:
        return self._size

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill ``target`` with bytes from ``offset`` on. Raises FileChanged if the file is shorter."""
        while target:
            count = os.preadv(self.handle, [target], offset)
            if count <= 0:
                raise FileChanged(self.path)
            target, offset = target[count:], offset + count

    def read(self, offset: int, length: int) -> memoryview:
        """Return a copy of ``length`` bytes from ``offset`` on. Raises OSError."""
        data = np.empty(length, np.uint8).data
        self.read_into(data, offset)
        return data

    def check_unchanged(self) -> None:
        """Raise FileChanged if the file was written after it was opened."""
        if _state(os.fstat(self.handle)) != self._state:
            raise FileChanged(self.path)


def open_file(path: Path, check: Callable[[Path], None] = lambda real: None) -> OpenFile:
    """Open a file, or return its `OpenFile` if it is already open and unchanged.

    ``check`` receives the path after all symbolic links and may raise.

    Raises:
        OSError: it cannot be opened, or it is not a regular file.
    """
    # O_NONBLOCK: opening a FIFO would block.
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{str(path)!r} is not a regular file")
        check(Path(os.path.realpath(f"/proc/self/fd/{handle}")))
    except BaseException:
        os.close(handle)
        raise
    return adopt(path, handle, status)


def adopt(path: Path, handle: int, status: os.stat_result) -> OpenFile:
    """Return an `OpenFile` that owns ``handle``; if the file already has one, close ``handle`` and return that one."""
    key = (status.st_dev, status.st_ino, *_state(status))
    with _lock:
        known = _open.get(key)
        if known is None:
            known = _open[key] = OpenFile(path, handle, status)
            return known
    os.close(handle)
    return known


def _state(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns
