"""The session that a thread is creating. Some callbacks and errors of ONNX Runtime do not identify their session.

ONNX Runtime creates the provider of a session, and asks it for claims and kernels, on the thread that creates the
session. During these calls an application's operator may create other sessions: `kept` restores the outer session when
the callback ends.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _State(threading.local):
    """State of a thread: the provider of the session that it creates, the record of the verdicts, and the error of the
    callback that failed last.

    The provider belongs to ONNX Runtime, which closes it with the session; the record outlives the provider.
    """

    provider: weakref.ref[Any] | None = None
    record: Any = None
    failure: str = ""


_state = _State()


def begin(provider: Any, record: Any) -> None:
    """Record that ONNX Runtime has created this provider for a session; ``record`` receives the verdicts of its
    nodes.
    """
    _state.provider, _state.record = weakref.ref(provider), record


def forget() -> None:
    """Forget the thread's session, before the thread creates another session."""
    _state.provider = _state.record = None
    _state.failure = ""


@contextmanager
def created() -> Iterator[None]:
    """Forget the thread's session while the block creates another one.

    If the new session has no provider of the plugin, remember the earlier session again.
    """
    before = _state.provider, _state.record
    forget()
    try:
        yield
    finally:
        if _state.record is None:
            _state.provider, _state.record = before


def failed(message: str) -> None:
    """Record the error of a callback of ONNX Runtime."""
    _state.failure = message


def provider() -> Any:
    """Return the `Provider` of the thread's session; None without a session, and after the provider was closed."""
    return None if _state.provider is None else _state.provider()


def record() -> Any:
    """Return the `VerdictRecord` of the thread's session; None without a session."""
    return _state.record


def failure() -> str:
    """Return the error of the callback that failed last in this thread's session; "" if none has failed."""
    return _state.failure


@contextmanager
def kept() -> Iterator[None]:
    """Restore the thread's current session after the block, which may create other sessions."""
    before = _state.provider, _state.record, _state.failure
    try:
        yield
    finally:
        _state.provider, _state.record, _state.failure = before
