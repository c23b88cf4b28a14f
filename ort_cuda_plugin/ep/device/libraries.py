"""Finds and loads vendor libraries: cuBLASLt and cuDNN."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ...abi.core import core, ffi, new_error
from ...compiler.nvidia_packages import nvidia_files

logger = logging.getLogger("ort_cuda_plugin")


@dataclass(frozen=True)
class Library:
    """A library by its number in ``ocp_library_id``, its name in `DeviceProperties.libraries`, and its file names."""

    number: int
    name: str
    files: tuple[str, ...]
    package: str


STAND_INS_VARIABLE = "ORT_CUDA_PLUGIN_EMULATE_LIBRARIES"
"""Environment variable: the folder of stand-in libraries that the emulated device offers."""

LIBRARIES = (
    Library(0, "cublaslt", ("libcublasLt.so.13", "libcublasLt.so.12"), "nvidia-cublas"),
    Library(1, "cudnn", ("libcudnn.so.9",), "nvidia-cudnn-cu13"),
)


def candidates(library: Library) -> Iterator[str]:
    """Yield the paths to try for a library, best first: NVIDIA's Python packages, then the system's loader."""
    for file in library.files:
        yield from map(str, nvidia_files(f"*/lib/{file}"))
    yield from library.files


@dataclass(frozen=True)
class LibraryPlace:
    """Location of a library: a path, or a name that the system's loader resolves. ``path`` is "" if the library was not
    found; ``why`` is then the reason.
    """

    path: str
    why: str = ""


@cache
def library_places() -> dict[str, LibraryPlace]:
    """Open the installed libraries. Return their locations by name."""
    return {library.name: _opened(library) for library in LIBRARIES}


@cache
def load_libraries() -> frozenset[str]:
    """Return the names of the libraries that work, and warn about the others. The plugin's own kernels replace a
    missing library.
    """
    for name, place in library_places().items():
        if not place.path:
            logger.warning(
                "%s is not used: %s. The plugin's own kernels replace it, which can be slower; "
                '`pip install "ort-cuda-plugin[libs]"` installs it',
                name,
                place.why,
            )
    return opened_libraries()


def opened_libraries() -> frozenset[str]:
    """Open the installed libraries, and return the names of those that work."""
    return frozenset(name for name, place in library_places().items() if place.path)


@cache
def load_stand_ins() -> frozenset[str]:
    """Load the stand-in libraries that the emulated device offers, and return their names.

    They are in the folder that `STAND_INS_VARIABLE` names; without the variable there are none. They compute on the
    memory of the emulated device: their variable ``fake_translate`` gets the function that translates the device's
    addresses to host addresses.

    Raises: ValueError: a library of the folder cannot be loaded.
    """
    folder = os.environ.get(STAND_INS_VARIABLE, "").strip()
    return frozenset(library.name for library in LIBRARIES if folder and _is_stand_in(library, Path(folder)))


def _is_stand_in(library: Library, folder: Path) -> bool:
    path = folder / f"lib{library.name}.so"
    error = new_error()
    if not path.exists():
        return False
    if core().library_load(library.number, os.fsencode(path), error):
        raise ValueError(f"{STAND_INS_VARIABLE}: {ffi.string(error.text).decode(errors='replace')}")
    try:
        translate = ctypes.c_void_p.in_dll(ctypes.CDLL(str(path)), "fake_translate")
    except ValueError:
        raise ValueError(
            f"{STAND_INS_VARIABLE}: {path} is not a stand-in of tests/c: it has no fake_translate"
        ) from None
    translate.value = int(ffi.cast("uintptr_t", core().emu_host_pointer))
    return True


def _opened(library: Library) -> LibraryPlace:
    reasons = []
    for path in candidates(library):
        error = new_error()
        if core().library_load(library.number, os.fsencode(path), error) == 0:
            return LibraryPlace(path)
        reasons.append(ffi.string(error.text).decode(errors="replace"))
    return LibraryPlace("", "; ".join(reasons))


def library_versions(names: frozenset[str]) -> dict[str, str]:
    """Return the versions of the libraries ``names``, such as "9.12.0"; "absent" for a library that is not loaded."""
    numbers = {library.name: core().library_version(library.number) for library in LIBRARIES if library.name in names}
    return {
        name: f"{number // 10000}.{number // 100 % 100}.{number % 100}" if number else "absent"
        for name, number in numbers.items()
    }
