"""Thread-local values that a ``with`` block replaces until it ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class ThreadValue(threading.local, Generic[T]):
    """A value that other threads do not see: each thread begins with the ``default``."""

    def __init__(self, default: T) -> None:
        self.value = default

    @contextmanager
    def replaced_by(self, value: T) -> Iterator[None]:
        """Give this thread another value in the block. Blocks may be nested."""
        before, self.value = self.value, value
        try:
            yield
        finally:
            self.value = before
