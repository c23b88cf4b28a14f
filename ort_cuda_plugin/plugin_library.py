"""Path of the shared library, and names of its execution provider.

ONNX Runtime's convention for packages of plugin execution providers requires these three functions.
"""

from __future__ import annotations

import importlib.metadata
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

EP_NAME = "CudaPluginExecutionProvider"
_FOLDER = Path(__file__).parent

if not _FOLDER.is_dir():
    raise ImportError(
        f"{_FOLDER}: the package is in an archive, from which no process can load its shared libraries; expected a "
        "folder. Unpack the archive, or install the package with pip"
    )

ProviderName: TypeAlias = Literal["CudaPluginExecutionProvider", "CUDAExecutionProvider"]
"""Names under which the library can offer its devices."""


def get_library_path() -> str:
    """Return the path of ``libort_cuda_plugin.so``, for ``onnxruntime.register_execution_provider_library``.

    Raises:
        FileNotFoundError: the library was not built.

    Examples:
        >>> ort_cuda_plugin.get_library_path().endswith("libort_cuda_plugin.so")
        True
    """
    path = _FOLDER.resolve() / "libort_cuda_plugin.so"
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist. Run `python build_plugin.py` in a source tree, or reinstall the package"
        )
    return str(path)


@cache
def plugin_version() -> str:
    """Return the version of the installed package; "unknown" if it runs from a source tree without an installation."""
    try:
        return importlib.metadata.version("ort-cuda-plugin")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def get_ep_name() -> str:
    """Return the name of the execution provider.

    Examples:
        >>> ort_cuda_plugin.get_ep_name()
        'CudaPluginExecutionProvider'
    """
    return EP_NAME


def get_ep_names() -> list[str]:
    """Return the names of all execution providers of the library: one.

    Examples:
        >>> ort_cuda_plugin.get_ep_names()
        ['CudaPluginExecutionProvider']
    """
    return [EP_NAME]
