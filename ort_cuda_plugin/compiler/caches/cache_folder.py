"""A disk cache that processes share: a `TrustedFolder` of entries, with a limit on their total size.

An entry's file holds a magic number, the SHA-256 of the contents, and the contents.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from ort_cuda_plugin.compiler.caches.trusted_files import Absent, TrustedFolder, Untrusted

logger = logging.getLogger("ort_cuda_plugin")

CACHE_DIR_VARIABLE = "ORT_CUDA_PLUGIN_CACHE_DIR"
abandoned_after_seconds = 3600.0
lock_suffix = ".lock"


def cache_folder() -> Path:
    """Return the folder of the cache: $ORT_CUDA_PLUGIN_CACHE_DIR, or ort-cuda-plugin in the user's cache folder.

    For a user without a home folder, as in some containers, the path begins with "~".
    """
    if configured := os.environ.get(CACHE_DIR_VARIABLE):
        return Path(configured)
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base if base and os.path.isabs(base) else os.path.expanduser("~/.cache")) / "ort-cuda-plugin"


def open_folder(folder: Path) -> TrustedFolder:
    """Open the folder, and create it if it is missing. Raises Untrusted, with the reason, if it cannot be used."""
    if folder.parts[:1] == ("~",):
        raise Absent("this user has no home folder")
    try:
        return TrustedFolder(folder)
    except Untrusted:
        raise
    except OSError as error:
        raise Untrusted(f"the folder cannot be opened or created: {error.strerror or error}") from error


class CacheFolder:
    """Entries by key in one folder. If the folder is unusable, a warning is logged once, and the cache stays empty.

    A folder that does not exist and cannot be created holds nothing: the warning comes when an entry is first needed.
    ``max_bytes`` limits the sum of the entries' sizes: the least recently used entries are removed. A subclass defines
    its entries by ``name``, ``suffix``, ``magic`` and ``max_entry_bytes``. Warnings contain ``consequence`` (what is
    lost without the folder) and ``remedy`` (what happens instead of using a damaged entry). Entries of a read-only
    folder can be read.
    """

    name: str
    suffix: str
    magic: bytes
    consequence: str
    remedy: str
    max_entry_bytes: int

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self.writes = 0
        self.opened: TrustedFolder | None = None
        self.problem = ""
        self._is_untold = False
        try:
            self.opened = open_folder(folder)
        except Absent as problem:
            self.problem = str(problem)
            self._is_untold = True
        except Untrusted as problem:
            self.disable(str(problem))

    @property
    def usable(self) -> bool:
        """Return whether entries can be read; if not, ``problem`` has the reason."""
        return not self.problem

    @property
    def writable(self) -> bool:
        """Return whether entries can be written."""
        return self.usable and self.opened is not None and self.opened.is_writable

    def disable(self, problem: str) -> None:
        if self.usable:
            self._log_problem(problem, logging.WARNING)
            self.problem = problem

    def _need_entry(self) -> None:
        """Warn, once, that the folder is absent, because an entry is needed now."""
        if self._is_untold:
            self._is_untold = False
            # A read-only cache, as in a container's image, may lack a subfolder on purpose, so do not warn then.
            is_left_out = self.folder.parent == cache_folder() and self.folder.parent.is_dir()
            self._log_problem(self.problem, logging.INFO if is_left_out else logging.WARNING)

    def _log_problem(self, problem: str, level: int) -> None:
        logger.log(
            level,
            "%s %s is not used: %s. %s; set %s to another folder.",
            self.name,
            self.folder,
            problem,
            self.consequence,
            CACHE_DIR_VARIABLE,
        )

    def file_name(self, key: str) -> str:
        return f"{key}{self.suffix}"

    def path(self, key: str) -> Path:
        return self.folder / self.file_name(key)

    def read(self, key: str) -> bytes | None:
        """Return the contents of the entry; None if it is missing, damaged, or perhaps another user's."""
        self._need_entry()
        data = self.read_file(self.file_name(key))
        if data is None:
            return None
        body = self._body(data)
        if body is None:
            self.tell_damaged(key)
        return body

    def tell_damaged(self, key: str) -> None:
        """Log that an entry is damaged."""
        logger.info("%s entry %s is damaged; %s", self.name, self.path(key), self.remedy)

    def _body(self, data: bytes) -> bytes | None:
        start = len(self.magic) + 32
        if not data.startswith(self.magic) or hashlib.sha256(data[start:]).digest() != data[len(self.magic) : start]:
            return None
        return data[start:]

    def is_whole(self, name: str) -> bool:
        """Return whether file ``name`` is an entry that `read` would accept. The check does not count as a use of the
        entry.
        """
        try:
            return (
                self.opened is not None and self._body(self.opened.read(name, self.max_entry_bytes, False)) is not None
            )
        except OSError:
            return False

    def write(self, key: str, body: bytes) -> None:
        """Write an entry atomically: a reader sees either all of it or nothing."""
        self._need_entry()
        data = self.magic + hashlib.sha256(body).digest() + body
        if not self.write_file(self.file_name(key), data):
            return
        if self.writes % 64 == 0:
            self.trim()
        self.writes += 1

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[bool]:
        """Lock the entry with ``key`` for a ``with`` block that creates the entry.

        Yields False at once if another process holds the lock, else True. A read-only folder has no locks: yields True.
        """
        with contextlib.ExitStack() as stack:
            held = True
            if self.opened is not None and self.writable:
                # without the lock, two processes may both create the entry, which is harmless
                with contextlib.suppress(OSError):
                    held = stack.enter_context(self.opened.lock(f"{key}{lock_suffix}"))
            yield held

    def read_file(self, name: str) -> bytes | None:
        """Return the contents of a file in the folder; None if it is missing, or perhaps another user's."""
        if self.opened is None or not self.usable:
            return None
        try:
            return self.opened.read(name, self.max_entry_bytes)
        except Untrusted as problem:
            logger.warning("%s entry %s is not used: %s; %s", self.name, self.folder / name, problem, self.remedy)
        except OSError:
            pass
        return None

    def write_file(self, name: str, data: bytes) -> bool:
        """Write a file in the folder atomically; return whether it was written."""
        if self.opened is None or not self.writable or len(data) > self.max_entry_bytes:
            return False
        try:
            self.opened.write(name, data)
        except OSError as error:
            self.disable(f"writing failed: {error.strerror or error}")
        return self.usable

    def trim(self) -> None:
        """Remove abandoned temporary files and lock files.

        If the entries exceed ``max_bytes``, also remove the least recently used ones until at most 90% of ``max_bytes``
        are left.
        """
        if self.opened is None:
            return
        entries = []
        for name, status in self.opened.files():
            if name.endswith((".part", lock_suffix)) and time.time() - status.st_mtime > abandoned_after_seconds:
                with contextlib.suppress(OSError):
                    self.opened.remove(name)
            elif name.endswith(self.suffix):
                entries.append((status.st_mtime, status.st_size, name))
        total = sum(size for _, size, _ in entries)
        if total <= self.max_bytes:
            return
        for _, size, name in sorted(entries):
            with contextlib.suppress(OSError):  # another process may have removed the file
                self.opened.remove(name)
            total -= size
            if total <= self.max_bytes * 9 // 10:
                return
