"""Vendor libraries: what a plan asks of cuBLASLt and cuDNN, and where they are found.

An operator records a library call where `DeviceProperties.libraries` has the library, and otherwise launches its own
kernel; both follow the contract in ``csrc_shim/vendor/problem.h``. So the emulated device, and a GPU without the
libraries, run our kernels, and a test on a GPU compares the two.
"""

from __future__ import annotations

import enum
import logging
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

WORKSPACE_BYTES = 32 * 1024 * 1024
"""Scratch memory that a library call may use; what NVIDIA recommends for cuBLASLt on recent GPUs."""

MATMUL, CONV = 0, 1
"""Kinds of problems: ``ocp_problem_kind``."""


class ProblemFlags(enum.IntFlag):
    """The flags of ``ocp_problem_spec``."""

    TF32 = 1
    DETERMINISTIC = 2
    BIAS = 4
    A_TRANSPOSED = 8
    B_TRANSPOSED = 16
    RELU = 32
    GELU = 64
    RESIDUAL = 128


@dataclass(frozen=True)
class LibraryProblem:
    """One problem for a vendor library, as plain data; the fields are those of ``ocp_problem_spec``.

    Sizes are arguments of the calls, so that equal problems share what the library prepared.
    """

    kind: int
    dtype: int
    flags: ProblemFlags
    rank: int = 0
    alpha: float = 1.0
    beta: float = 0.0


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
    from ..abi.core import core, ffi, new_error

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
