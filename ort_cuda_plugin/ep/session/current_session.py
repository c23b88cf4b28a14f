"""The session that a thread is creating, for callbacks and errors that do not say which session they are about.

ONNX Runtime creates the provider of a session, and asks it for claims and kernels, on the thread that creates the
session. An application's operator may create sessions of its own meanwhile: `kept` puts the outer session back when the
callback ends.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _State(threading.local):
    """Per thread: the latest provider that no ended callback created, and the record of its verdicts.

    The provider belongs to ONNX Runtime, which closes it with the session; the record outlives it.
    """

    provider: weakref.ref[Any] | None = None
    record: Any = None


_state = _State()


def begin(provider: Any, record: Any) -> None:
    """Record that ONNX Runtime has created this provider for a session; ``record`` receives the verdicts of its
    nodes.
    """
    _state.provider, _state.record = weakref.ref(provider), record


def forget() -> None:
    """Forget the session: later calls concern one that is created now."""
    _state.provider = _state.record = None


def provider() -> Any:
    """Return the `Provider`, or None."""
    return None if _state.provider is None else _state.provider()


def record() -> Any:
    """Return the `VerdictRecord`, or None."""
    return _state.record


@contextmanager
def kept() -> Iterator[None]:
    """Separate sessions that are created in the block from the thread's current one."""
    before = _state.provider, _state.record
    try:
        yield
    finally:
        _state.provider, _state.record = before
