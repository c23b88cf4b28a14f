"""Where the file of a context is: relative to its model, inside the model's folder."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path, PurePosixPath

from .errors import ContextError


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
