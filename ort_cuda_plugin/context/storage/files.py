"""Files of contexts: finds them beside a model, reads them, and writes them atomically.

No file is mapped into memory: see `model.open_file`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from ...model.open_file import OpenFile, adopt, native_path, open_file
from .errors import ContextError

Buffer: TypeAlias = "bytes | memoryview"
Readable: TypeAlias = "Buffer | OpenFile"


@dataclass(frozen=True)
class ModelFolder:
    """The folder of a model, to which the names of its files are relative.

    A symbolic link in the folder may lead into the folder, or into the folder of the model's real file. In the cache of
    the Hugging Face hub, where all files are links, it may also lead to the folder ``blobs``.

    Attributes:
        path: the folder.
        home: the folder of the model's file, after all links are resolved.
    """

    path: Path
    home: Path

    @staticmethod
    def of(model: Path | str) -> ModelFolder:
        """Return the folder of the model at a path."""
        return ModelFolder(Path(model).parent, Path(os.path.realpath(model)).parent)

    @staticmethod
    def at(folder: Path | str) -> ModelFolder:
        """Return the folder of models that are not links."""
        return ModelFolder(Path(folder), Path(folder))

    @property
    def _allowed(self) -> Iterator[Path]:
        """Yield the folders to which links may lead. The Hugging Face hub's cache of a model has snapshots/REVISION/...
        with links to blobs/...
        """
        yield from (self.path, self.home)
        for above in Path(os.path.realpath(self.path)).parents:
            if above.name == "snapshots":
                yield above.with_name("blobs")

    def has(self, name: str) -> bool:
        """Return whether there is a file of that name; `open` may still refuse to open the file."""
        return bool(name) and any(os.path.lexists(folder / native_path(name)) for folder in (self.path, self.home))

    def open(self, name: str, subject: str) -> OpenFile:
        """Open the file that a model calls ``name``. Messages call it ``subject``.

        Raises:
            ContextError: the name leads out of the folder, or the file cannot be read.
        """
        relative = native_path(str(check_name(name, subject)))

        def check(real: Path) -> None:
            if not any(real.is_relative_to(os.path.realpath(folder)) for folder in self._allowed):
                raise ContextError(
                    f"{subject}: symbolic link to {str(real)!r} leaves the model's folder; copy the file into the "
                    "folder"
                )

        is_at_home = not os.path.lexists(self.path / relative) and os.path.lexists(self.home / relative)
        try:
            return open_file((self.home if is_at_home else self.path) / relative, check)
        except OSError as error:
            why = error.strerror or "it is not a regular file"
            raise ContextError(
                f"{subject} cannot be read in the folder {str(self.path)!r}: {why}; put a readable file into this "
                "folder"
            ) from error


def open_context(folder: ModelFolder, name: str) -> OpenFile:
    """Open the file that a node in a model of ``folder`` names. Raises the errors of `ModelFolder.open`."""
    return folder.open(name, f"context file {name!r}")


def check_name(name: str, subject: str) -> PurePosixPath:
    """Check the path by which a model names a file. Raises ContextError if it could lead out of the model's folder."""
    relative = PurePosixPath(name)
    if not name or "\0" in name or "\\" in name or relative.is_absolute() or ".." in relative.parts:
        raise ContextError(
            f"{subject}: got the path {name!r}, expected a relative path without '..', backslashes and NUL, which is "
            "not empty and stays inside the model's folder"
        )
    return relative


def read(source: Readable, offset: int, length: int, subject: str) -> memoryview:
    """Read bytes from memory or a file. Raises ContextError if the file has become shorter."""
    try:
        return source.read(offset, length) if isinstance(source, OpenFile) else memoryview(source)[offset:][:length]
    except OSError as error:
        raise ContextError(f"{subject}: {error}") from error


def refuse_to_replace(outputs: Mapping[str, Path | None], sources: Iterable[Path], why: str) -> None:
    """Check that no output replaces a file that is still needed, under any name or link.

    ``outputs`` are paths by their names in messages, None for a file that is not written.

    Raises: ContextError: an output would replace a needed file; ``why`` is the reason in the message.
    """
    needed = {}
    for source in sources:
        with contextlib.suppress(OSError):
            status = source.stat()
            needed[status.st_dev, status.st_ino] = source
    for subject, path in outputs.items():
        with contextlib.suppress(OSError):
            status = Path(path or "").stat()
            found = needed.get((status.st_dev, status.st_ino)) if path else None
            if found is not None:
                raise ContextError(
                    f"{subject} {str(path)!r}: it would replace {str(found)!r}, {why}. Write the compiled model to "
                    "another path"
                )


def write_whole(path: Path, pieces: Iterable[Buffer], subject: str) -> OpenFile:
    """Write a file atomically: readers see all of it or nothing, also if the process is killed. Return the file for
    reading.

    An incomplete file has no name, or a temporary name beside ``path`` if the file system has no unnamed files. Several
    processes may write the same file: the last one wins.

    Raises:
        ContextError: the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        handle, has_name = _new_file(partial)
        try:
            with open(handle, "wb", closefd=False) as file:
                for piece in pieces:
                    file.write(piece)
            os.fsync(handle)
            if not has_name:
                # The path in /proc is a symbolic link, and os.link follows it only if it gets src_dir_fd. Since the
                # path is absolute, the value of src_dir_fd does not matter.
                os.link(f"/proc/self/fd/{handle}", partial, src_dir_fd=handle, follow_symlinks=True)
            os.replace(partial, path)
            return adopt(path, handle, os.fstat(handle))
        except BaseException:
            os.close(handle)
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise
    except OSError as error:
        raise ContextError(f"{subject} cannot be written: {error.strerror or error}; choose another path") from error


def _new_file(partial: Path) -> tuple[int, bool]:
    """Create a file; return its handle, and whether it has the name ``partial``."""
    if os.path.exists("/proc/self/fd"):
        with contextlib.suppress(OSError):  # EOPNOTSUPP, EISDIR: this file system has no unnamed files
            return os.open(partial.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666), False
    return os.open(partial, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666), True
