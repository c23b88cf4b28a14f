"""Exception guards: turn exceptions into errors of C, because no Python exception may cross into ONNX Runtime.

There is one guard for each kind of return value. A guard is a decorator that installs a function as an ``extern
"Python"`` of the bridge. ORT gets the message of the exception. ORT's log gets the traceback, at level VERBOSE unless
the exception has another ``log_level``.
"""

from __future__ import annotations

import functools
import signal
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from types import TracebackType
from typing import Any

from ...abi import host
from ...abi.core import PluginError, core, ffi, lib
from . import current_session

Callback = Callable[..., None]

#: OrtErrorCode by exception, for exceptions that have no ``ort_code`` of their own.
_CODES: dict[type[BaseException], int] = {
    ValueError: lib.ORT_INVALID_ARGUMENT,
    NotImplementedError: lib.ORT_NOT_IMPLEMENTED,
    KeyboardInterrupt: lib.ORT_FAIL,
}


def describe(error: BaseException) -> tuple[int, str]:
    """Return the OrtErrorCode and the message for an exception.

    Errors of this package, and those with ``ort_code``, keep their message. Any other exception is a bug, and its
    message names the class and the line.
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
    host.log(getattr(error, "log_level", "VERBOSE"), "".join(traceback.format_exception(error)), where=name)
    return code, message


def _pass_on(error: BaseException) -> None:
    """Raise SIGINT again after the callback has returned, because the KeyboardInterrupt is not passed on.

    If the application has its own signal handler, that handler has already seen the signal.
    """
    if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        core().interrupt_after_call()


def _install(name: str, call: Callable[..., Any], failed: Callable[[BaseException, Any], Any], error: Any) -> None:
    """Install ``call`` as the callback ``name`` of the bridge.

    A signal handler or the recursion limit can raise before the first line of ``call``, outside of its try. Then
    ``failed`` is called with the exception and the arguments (None if there is no frame yet). If ``failed`` raises as
    well, C gets ``error``.
    """

    def on_error(kind: Any, exception: BaseException, trace: TracebackType | None) -> Any:
        return failed(exception, None if trace is None else trace.tb_frame.f_locals.get("arguments"))

    ffi.def_extern(name=f"ocp_py_{name}", error=error, onerror=on_error)(call)


def status_guard(function: Callback, *, forgiven: bool = False, begins_session: bool = False) -> Callback:
    """Guard callbacks that return ``OrtStatus *``: an exception becomes a status.

    ``forgiven``: ONNX Runtime ignores a failure and creates the session without the provider. ``begins_session``: the
    callback creates the provider of a session, which stays the thread's current session. Other callbacks restore the
    thread's current session when they return.
    """

    def failed(error: BaseException, arguments: Any) -> Any:
        if forgiven:
            _pass_on(error)
        code, message = _report(function.__name__, error)
        current_session.failed(message)
        return host.make_status(code, message)

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            with nullcontext() if begins_session else current_session.kept():
                function(*arguments)
        except BaseException as error:
            return failed(error, arguments)
        return ffi.NULL

    _install(function.__name__, call, failed, ffi.cast("OrtStatus *", lib.OCP_PYTHON_BROKE))
    return function


def error_guard(function: Callback) -> Callback:
    """Guard callbacks that return an error code and take an ``ocp_error *`` last."""

    def failed(error: BaseException, arguments: Any) -> int:
        code, message = _report(function.__name__, error)
        if arguments:
            target = arguments[-1]
            # Truncate between characters.
            data = message.encode(errors="replace")[: ffi.sizeof(target.text) - 1].decode(errors="ignore").encode()
            target.code = code
            target.text = data + b"\0"
        return code

    @functools.wraps(function)
    def call(*arguments: Any) -> int:
        try:
            with current_session.kept():
                function(*arguments[:-1])
        except BaseException as error:
            return failed(error, arguments)
        return 0

    _install(function.__name__, call, failed, lib.ORT_FAIL)
    return function


def void_guard(function: Callback) -> Callback:
    """Guard callbacks that return nothing: an exception is logged.

    If a KeyboardInterrupt ends the callback, the guard calls it once more, so that for example no object is left
    unreleased.
    """

    def failed(error: BaseException, arguments: Any) -> None:
        host.log("ERROR", _report(function.__name__, error)[1], where=function.__name__)
        _pass_on(error)

    @functools.wraps(function)
    def call(*arguments: Any) -> None:
        try:
            with current_session.kept():
                function(*arguments)
        except KeyboardInterrupt as error:
            interrupted(error, arguments)
        except BaseException as error:
            failed(error, arguments)

    def interrupted(error: BaseException, arguments: Any) -> None:
        if arguments:
            try:
                function(*arguments)
            except (LookupError, KeyboardInterrupt):
                pass  # the first attempt had already removed the object, or a second interrupt arrived
            except BaseException as again:
                failed(again, arguments)
        failed(error, arguments)

    _install(function.__name__, call, interrupted, None)
    return function
