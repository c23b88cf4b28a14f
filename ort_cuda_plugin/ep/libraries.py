"""Vendor libraries: where they are found, and which of them a process has."""

from __future__ import annotations

import logging
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..abi.core import core, ffi, new_error

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Library:
    """A library by its number in ``ocp_library_id``, its name in `DeviceProperties.libraries`, and its file names."""

    number: int
    name: str
    files: tuple[str, ...]
    package: str


LIBRARIES = (
    Library(0, "cublaslt", ("libcublasLt.so.13", "libcublasLt.so.12"), "nvidia-cublas"),
    Library(1, "cudnn", ("libcudnn.so.9",), "nvidia-cudnn-cu13"),
)


def candidates(library: Library, site_packages: Path) -> Iterator[str]:
    """Where to look for a library, best first: pip's NVIDIA packages, then wherever the system's loader looks."""
    for file in library.files:
        yield from map(str, sorted(site_packages.glob(f"nvidia/*/lib/{file}")))
    yield from library.files


@cache
def load_libraries() -> frozenset[str]:
    """Opens the libraries that are installed; the names of those that work. The reason why not goes to the log."""
    found = set()
    for library in LIBRARIES:
        reasons = []
        for path in candidates(library, Path(sysconfig.get_paths()["purelib"])):
            error = new_error()
            if core().library_load(library.number, os.fsencode(path), error) == 0:
                found.add(library.name)
                break
            reasons.append(ffi.string(error.text).decode())
        else:
            logger.info("%s is not used (pip package %s): %s", library.name, library.package, "; ".join(reasons))
    return frozenset(found)
