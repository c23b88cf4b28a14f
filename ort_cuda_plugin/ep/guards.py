"""Nothing that Python raises may cross into ONNX Runtime: one guard for each kind of return value.

A guard installs a function as an ``extern "Python"`` of the bridge. The message that ORT gets says what was wrong; the
traceback of an error that is a bug of ours goes to ORT's log.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any

from ..abi import host
from ..abi.core import PluginError, ffi, lib

Callback = Callable[..., None]

#: OrtErrorCode of exceptions that say how they want to be reported.
_CODES: dict[type[BaseException], int] = {
    ValueError: lib.ORT_INVALID_ARGUMENT,
    NotImplementedError: lib.ORT_NOT_IMPLEMENTED,
    KeyboardInterrupt: lib.ORT_FAIL,
}


def describe(error: BaseException) -> tuple[int, str]:
    """The OrtErrorCode and the message for an exception.

    Errors whose class has ``ort_code`` and those of this package speak for themselves; of any other the message names
    the class and the line, since it is a bug.
    """
    if isinstance(error, (PluginError, host.OrtError)):
        return error.code, str(error)
    code = getattr(error, "ort_code", None)
    if code is not None:
        return int(code), str(error)
    for kind, known in _CODES.items():
        if type(error) is kind:
            return known, str(error) or kind.__name__
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return lib.ORT_FAIL, f"{type(error).__name__}: {error}{place}"


def _report(name: str, error: BaseException) -> tuple[int, str]:
    code, message = describe(error)
    host.log("VERBOSE", "".join(traceback.format_exception(error)), where=name)
    return code, message


def _install(name: str, call: Callable[..., Any]) -> None:
    ffi.def_extern(name=f"ocp_py_{name}")(call)


def status_guard(function: Callback) -> Callback:
    """For callbacks that return ``OrtStatus *``: an exception becomes a status."""

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            function(*arguments)
        except BaseException as error:
            return host.make_status(*_report(function.__name__, error))
        return ffi.NULL

    _install(function.__name__, call)
    return function


def error_guard(function: Callback) -> Callback:
    """For callbacks that return an error code and take an ``ocp_error *`` last."""

    @functools.wraps(function)
    def call(*arguments: Any) -> int:
        try:
            function(*arguments[:-1])
        except BaseException as error:
            code, message = _report(function.__name__, error)
            target = arguments[-1]
            # Cut at a character, not inside one.
            data = message.encode()[: ffi.sizeof(target.text) - 1].decode(errors="ignore").encode()
            target.code = code
            target.text = data + b"\0"
            return code
        return 0

    _install(function.__name__, call)
    return function


def void_guard(function: Callback) -> Callback:
    """For callbacks that return nothing: an exception is logged."""

    @functools.wraps(function)
    def call(*arguments: Any) -> None:
        try:
            function(*arguments)
        except BaseException as error:
            host.log("ERROR", _report(function.__name__, error)[1], where=function.__name__)

    _install(function.__name__, call)
    return function
