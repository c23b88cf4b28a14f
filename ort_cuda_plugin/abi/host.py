"""The ONNX Runtime that has loaded the library: its function tables, statuses, key-value pairs and log.

These functions work only inside a callback of the plugin, or while the library is registered.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from .core import core, ffi, lib
from .errors import Error

python_logger = logging.getLogger("ort_cuda_plugin").getChild("onnxruntime")
"""Python's logger that gets a copy of the lines that the plugin writes to ORT's log."""
PYTHON_LEVELS = {
    "VERBOSE": logging.DEBUG,
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
    "FATAL": logging.CRITICAL,
}
"""The levels of `python_logger`, by ORT's severities."""


class OrtError(Error, RuntimeError):
    """ONNX Runtime returned a status. ``code`` is its OrtErrorCode."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def api() -> Any:
    """Return ``const OrtApi *`` of the host.

    Raises:
        RuntimeError: the library is not registered.
    """
    table = core().host_api()
    if table == ffi.NULL:
        raise RuntimeError(
            "the plugin library is not registered with ONNX Runtime. Call ort_cuda_plugin.register first"
        )
    return table


def ep_api() -> Any:
    """Return ``const OrtEpApi *`` of the host. Raises RuntimeError if the library is not registered."""
    api()
    return core().host_ep_api()


def api_version() -> int:
    """Return the negotiated API version, at most the N of ONNX Runtime 1.N; 0 before a registration."""
    return int(core().host_api_version())


def host_version() -> int:
    """Return the N of the host's ONNX Runtime 1.N; 0 before a registration."""
    return int(core().host_version())


def check_status(status: Any) -> None:
    """Release a returned ``OrtStatus *``.

    Raises:
        OrtError: the status was an error.
    """
    if status != ffi.NULL:
        table = api()
        message = ffi.string(table.GetErrorMessage(status)).decode(errors="replace")
        code = int(table.GetErrorCode(status))
        table.ReleaseStatus(status)
        raise OrtError(message, code)


def make_status(code: int, message: str) -> Any:
    """Return a new ``OrtStatus *`` for ORT to release."""
    return api().CreateStatus(code, message.encode(errors="replace"))


def text(pointer: Any) -> str:
    """Return the UTF-8 text of a ``const char *``; "" for NULL."""
    return "" if pointer == ffi.NULL else ffi.string(pointer).decode(errors="replace")


def texts(values: Sequence[str]) -> tuple[Any, list[Any]]:
    """Return texts as ``const char *[]``, and an object that keeps them alive."""
    kept = [ffi.new("char[]", value.encode()) for value in values]
    return ffi.new("const char *[]", kept), kept


def key_value_pairs(pairs: Any) -> dict[str, str]:
    """Return the contents of an ``OrtKeyValuePairs *`` (NULL: none)."""
    if pairs == ffi.NULL:
        return {}
    keys, values, count = ffi.new("const char *const **"), ffi.new("const char *const **"), ffi.new("size_t *")
    api().GetKeyValuePairs(pairs, keys, values, count)
    return {text(keys[0][i]): text(values[0][i]) for i in range(count[0])}


class KeyValuePairs:
    """An OrtKeyValuePairs that Python fills, released at the end of the with block; ORT copies it."""

    def __init__(self, items: Mapping[str, str] | Iterable[tuple[str, str]]) -> None:
        self._items = dict(items)
        self._out = ffi.new("OrtKeyValuePairs **")

    def __enter__(self) -> Any:
        api().CreateKeyValuePairs(self._out)
        for key, value in self._items.items():
            api().AddKeyValuePair(self._out[0], key.encode(), value.encode())
        return self._out[0]

    def __exit__(self, *_: object) -> None:
        api().ReleaseKeyValuePairs(self._out[0])


def log(level: str, message: str, logger: Any = None, *, where: str = "ort_cuda_plugin") -> None:
    """Write one line to ORT's log, and to Python's logger `python_logger` if the application handles its lines.

    The level of `python_logger` filters its lines; the severity of ORT's log does not.

    Args:
        level: VERBOSE, INFO, WARNING, ERROR or FATAL.
        message: the line.
        logger: ``const OrtLogger *``; None is the default logger, which outlives the sessions.
        where: the function name that ORT prints.
    """
    _log_in_python(level, message)
    target = core().host_logger() if logger is None else logger
    if target == ffi.NULL:
        return
    severity = getattr(lib, f"ORT_LOGGING_LEVEL_{level}")
    # ORT requires a file path, which it prints.
    status = api().Logger_LogMessage(
        target, severity, message.encode(errors="replace"), b"ort_cuda_plugin", 0, where.encode()
    )
    if status != ffi.NULL:  # a failing log must not make the caller fail
        api().ReleaseStatus(status)


def _log_in_python(level: str, message: str) -> None:
    """Pass a line to `python_logger`. Without a handler Python would print it on the standard error, as ORT does."""
    with suppress(Exception):  # an application's filter must not make the caller fail
        if python_logger.isEnabledFor(PYTHON_LEVELS[level]) and python_logger.hasHandlers():
            python_logger.log(PYTHON_LEVELS[level], "%s", message)
