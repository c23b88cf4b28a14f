"""Finds and loads files of NVIDIA's packages in each folder from which Python imports packages.

NVIDIA's ``cuda-pathfinder``, with which Numba and cuda-bindings load their libraries, searches the site-packages of the
interpreter only. Packages may also be in a folder of PYTHONPATH, such as that of ``pip install --target`` or a layer of
a function service, or in one that a ``.pth`` file names, such as the environment below that of ``uv run --with``.
cuda-pathfinder takes a library that is loaded already, so this module loads the libraries before it does.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

logger = logging.getLogger("ort_cuda_plugin")

CUDA_RUNTIME = ("libcudart.so.13", "libcudart.so.12")
NVVM = ("libnvvm.so.4",)
NVJITLINK = ("libnvJitLink.so.13", "libnvJitLink.so.12")
NVRTC = ("libnvrtc.so.13", "libnvrtc.so.12")


def import_folders() -> list[str]:
    """Return the entries of sys.path from which this package loads code: absolute, and not the working folder."""
    return [entry for entry in sys.path if os.path.isabs(entry) and not _is_working_folder(entry)]


def _is_working_folder(folder: str) -> bool:
    try:
        return os.path.samefile(folder, os.curdir)
    except OSError:
        return False


def nvidia_files(*patterns: str) -> Iterator[Path]:
    """Yield the files that match ``patterns`` below ``nvidia/``, as "*/lib/libcudnn.so.9", in the order of sys.path.

    Folders that the user of the process must not read are left out.
    """
    for folder in import_folders():
        for pattern in patterns:
            try:
                found = sorted(Path(folder).glob(f"nvidia/{pattern}"))
            except OSError:
                continue
            yield from found


@cache
def load_library(names: tuple[str, ...]) -> None:
    """Load the first installed library of ``names`` into the process, where cuda-pathfinder finds it.

    Each compilation calls this function, so only the first call for a library searches for it. If none is installed,
    or it cannot be loaded, cuda-pathfinder searches the system for one.
    """
    for path in nvidia_files(*(f"*/lib/{name}" for name in names), *(f"*/nvvm/lib64/{name}" for name in names)):
        try:
            ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_GLOBAL)
        except OSError as error:
            logger.debug("%s cannot be loaded: %s", path, error)
        else:
            return
