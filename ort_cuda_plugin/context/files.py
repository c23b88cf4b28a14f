"""The files of contexts: where they are, relative to a model and inside its folder, and how they are written."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from .errors import ContextError

Buffer: TypeAlias = "bytes | memoryview"


def map_context(folder: Path, name: str) -> memoryview:
    """The contents of the file that a node in a model of ``folder`` names, mapped into memory.

    Raises:
        ContextError: the name leads out of the folder, or the file cannot be read.
    """
    return map_file(folder, name, f"context file {name!r}")


def map_file(folder: Path, name: str, subject: str) -> memoryview:
    """As `map_context`; ``subject`` is what messages call the file."""
    relative = check_name(name, subject)
    try:
        # A FIFO would block; a link is judged by where it leads, once it is open.
        handle = os.open(folder / relative, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        where = f"in {str(folder)!r}: {error.strerror or error}"
        raise ContextError(f"{subject} cannot be read {where}; it belongs beside the model") from error
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise ContextError(f"{subject} in {str(folder)!r} is no file")
        real = Path(os.path.realpath(f"/proc/self/fd/{handle}"))
        if not real.is_relative_to(os.path.realpath(folder)):
            raise ContextError(f"{subject} is a link to {str(real)!r}, which is outside the model's folder")
        if status.st_size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(handle, 0, prot=mmap.PROT_READ))
    except OSError as error:
        raise ContextError(f"{subject} cannot be read: {error.strerror or error}") from error
    finally:
        os.close(handle)


def check_name(name: str, subject: str) -> PurePosixPath:
    """The path that a model calls a file. Raises ContextError where it could lead out of the model's folder."""
    relative = PurePosixPath(name)
    if not name or "\0" in name or "\\" in name or relative.is_absolute() or ".." in relative.parts:
        raise ContextError(f"{subject}: only a path inside the model's folder is allowed, without '..'")
    return relative


def refuse_to_replace(outputs: Mapping[str, Path | None], sources: Iterable[Path], why: str) -> None:
    """Checks that no output is a file that is still needed, under whatever name or link.

    ``outputs`` are paths by what messages call them, None for what is not written.

    Raises:
        ContextError: one is; ``why`` says why the file is needed.
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


def check_whole(data: memoryview, subject: str) -> None:
    """Where ``data`` is mapped from a file that is shorter now, a read of it would end the process.

    Raises:
        ContextError: it is; ``subject`` is what the message calls the file.
    """
    if isinstance(data.obj, mmap.mmap) and data.obj.size() < len(data.obj):
        raise ContextError(f"{subject} became shorter while it was read; files that are in use must not change")


def write_whole(path: Path, pieces: Iterable[Buffer], subject: str) -> memoryview:
    """Writes a file, which readers see whole or not at all, also where the process is killed; the result maps it.

    Until it is whole it has no name, or where the file system cannot do that, a temporary one beside ``path``. Several
    processes may write the same file: the last one wins.

    Raises:
        ContextError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        handle, has_name = _new_file(partial)
        try:
            with open(handle, "w+b") as file:
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(handle)
                written = memoryview(mmap.mmap(handle, 0, prot=mmap.PROT_READ))
                if not has_name:
                    # Python follows links only where it is given a folder, of which an absolute path makes no use.
                    os.link(f"/proc/self/fd/{handle}", partial, src_dir_fd=handle, follow_symlinks=True)
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise
    except OSError as error:
        raise ContextError(f"{subject} cannot be written: {error.strerror or error}") from error
    return written


def _new_file(partial: Path) -> tuple[int, bool]:
    """A handle of a new file, and whether it has the name ``partial``."""
    if os.path.exists("/proc/self/fd"):
        with contextlib.suppress(OSError):  # EOPNOTSUPP, EISDIR: no such files here
            return os.open(partial.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666), False
    return os.open(partial, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666), True
