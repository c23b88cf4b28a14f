"""Calls functions, and imports modules, on another thread, where no signal handler can raise an exception.

Python runs signal handlers on the main thread, between any two instructions. If Ctrl-C ends an import or a compilation
there, the import or compilation stays incomplete for the rest of the process: packages lack attributes for submodules
that were already imported, and Numba's tables lack entries.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class _Call(threading.Thread, Generic[T]):
    """A thread that calls ``function``, and keeps its result or exception. Python joins the thread at exit."""

    def __init__(self, function: Callable[[], T]) -> None:
        super().__init__(name="ort-cuda-plugin")
        self.function = function
        self.result: T | None = None
        self.error: BaseException | None = None
        # A lock instead of join(), because an interrupted join of Python 3.11 marks the thread as finished.
        self.unfinished = threading.Lock()
        self.unfinished.acquire()

    def run(self) -> None:
        try:
            self.result = self.function()
        except BaseException as error:
            self.error = error
        finally:
            self.unfinished.release()


def call(function: Callable[[], T], abandoned: Callable[[], object] = lambda: None) -> T:
    """Call ``function`` on another thread, and return or raise its outcome.

    If a signal handler raises an exception, only the wait ends: ``abandoned`` is called, the caller gets the exception,
    and the function finishes in the background. So the function must take no lock that the caller holds.
    """
    running = _Call(function)
    try:
        try:
            running.start()
        except RuntimeError:  # the system allows no further thread
            return function()
        running.unfinished.acquire()
    except BaseException:
        abandoned()
        raise
    try:
        if running.error is not None:
            raise running.error
        result: Any = running.result
        return result  # type: ignore[no-any-return]
    finally:
        del running  # the error's traceback refers to this frame, which would keep the call alive


def imported(name: str) -> ModuleType:
    """Import a module on another thread, if it is not imported yet, and return it."""
    module = sys.modules.get(name)
    if module is None or getattr(module.__spec__, "_initializing", False):
        return call(lambda: importlib.import_module(name))
    return module
