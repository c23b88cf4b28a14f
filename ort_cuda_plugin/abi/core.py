"""Python's bindings of the table ``ocp_core``, by which Python calls the C library.

``core()`` is the cffi struct of ``csrc_shim/python/tables.h``; calling a member releases the GIL. Members that can fail
take an ``ocp_error *``::

    error = new_error()
    core().weight_acquire(device, memory, data, nbytes, out, error)
    check(error)
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .. import _bridge
from .errors import Error

ffi = _bridge.ffi
lib = _bridge.lib

LIBRARY_PATH = Path(__file__).resolve().parent.parent / "libort_cuda_plugin.so"

_core: Any = None


class PluginError(Error, RuntimeError):
    """The C library reported an error. ``code`` is its OrtErrorCode.

    Examples:
        >>> try:
        ...     stats = ort_cuda_plugin.memory_stats()
        ... except ort_cuda_plugin.PluginError as error:
        ...     print("the device cannot be opened:", error)
    """

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def core() -> Any:
    """Return the library's table (``const ocp_core *``), opened on first use.

    Raises:
        PluginError: the library is missing or cannot be loaded, or library and package are of different builds.
    """
    return _core if _core is not None else _open()


def _open() -> Any:
    global _core
    text = ffi.new("char[1000]")
    table = lib.ocp_bridge_open(os.fsencode(LIBRARY_PATH), text, len(text))
    if table == ffi.NULL:
        raise PluginError(
            f"cannot open the plugin library: {ffi.string(text).decode(errors='replace')}. Run build_plugin.py in a "
            "source tree, else reinstall the package"
        )
    _check_build(table)
    _core = table
    return table


def _check_build(table: Any) -> None:
    if table.abi != lib.OCP_CORE_ABI:
        raise PluginError(
            "libort_cuda_plugin.so and _bridge.abi3.so are of different builds. Run build_plugin.py again in a source "
            "tree, else reinstall the package"
        )


def attach(address: int) -> None:
    """Use the ``ocp_core`` table at ``address``, from the copy of the library that this process has loaded.

    Raises:
        PluginError: Python already uses another copy of the library, or library and bridge are of different builds.
    """
    global _core
    table = ffi.cast("const ocp_core *", address)
    _check_build(table)
    if _core is not None and _core != table:
        raise PluginError(
            "the process has loaded two copies of libort_cuda_plugin.so. Register only the copy that "
            "ort_cuda_plugin.get_library_path() names"
        )
    _core = table


def new_error() -> Any:
    """Return a new ``ocp_error *`` that holds no error."""
    return ffi.new("ocp_error *")


def check(error: Any, subject: str = "") -> None:
    """Raise PluginError if ``error`` (``ocp_error *``) holds an error.

    The message begins with ``subject`` if there is one.
    """
    if error.code:
        text = ffi.string(error.text).decode(errors="replace")
        raise PluginError(f"{subject}: {text}" if subject else text, error.code)


def driver_error_text(driver: Any, code: int) -> str:
    """Return the name of a CUresult that a call of ``driver`` (``const ocp_driver *``) just returned in this thread,
    with the emulator's explanation in parentheses if it has one.
    """
    name = ffi.new("const char **")
    known = driver.GetErrorName(code, name) == 0 and name[0] != ffi.NULL
    text = ffi.string(name[0]).decode() if known else f"CUDA error {code}"
    if driver.LastErrorText and (detail := ffi.string(driver.LastErrorText())):
        text += f" ({detail.decode(errors='replace')})"
    return text


def counter_names() -> list[str]:
    table = core()
    return [ffi.string(table.counter_names[i]).decode() for i in range(table.num_counters)]


def counters() -> dict[str, int]:
    """Return the process-wide counters by name."""
    table = core()
    return {name: table.counter_get(i) for i, name in enumerate(counter_names())}


def reset_counters() -> None:
    """Set the counters of events, such as launches, to 0. Counters of bytes in use and of live objects stay."""
    core().counters_reset()


def count(name: str, by: int = 1) -> None:
    """Add to one counter; ``name`` is a member of ``ocp_counter`` without its prefix, for example KERNELS_COMPILED."""
    core().counter_add(getattr(lib, f"OCP_{name}"), by)
