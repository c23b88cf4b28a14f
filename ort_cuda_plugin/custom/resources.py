"""Resources that several operators share, by key: the first user makes one, the last one releases it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass
class _Entry:
    value: Any
    users: int
    release: Callable[[Any], None] | None


class SharedResource(Generic[T]):
    """One use of a resource; ends with `close` or with its ``with`` block."""

    def __init__(self, owner: Resources, key: str, value: T) -> None:
        self._owner, self._key, self.value = owner, key, value
        self._open = True

    def close(self) -> None:
        """End this use. It is safe to call this again."""
        if self._open:
            self._open = False
            self._owner._give_back(self._key)

    def __enter__(self) -> T:
        return self.value

    def __exit__(self, *_: object) -> None:
        self.close()


class Resources:
    """Resources of a process by key, with use counts. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._entries: dict[str, _Entry] = {}

    def acquire(self, key: str, make: Callable[[], T], release: Callable[[T], None] | None = None) -> SharedResource[T]:
        """Return a use of the resource with this key.

        The ``make`` of the first user creates the resource; the end of the last use calls the ``release`` of that first
        user.

        Exceptions of ``make`` are passed on; the resource then does not exist.
        """
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = _Entry(make(), 0, release)
            entry.users += 1
            return SharedResource(self, key, entry.value)

    def users(self, key: str) -> int:
        """Return the number of uses of a resource; 0 if there is none."""
        with self._lock:
            return self._entries[key].users if key in self._entries else 0

    def _give_back(self, key: str) -> None:
        with self._lock:
            entry = self._entries[key]
            entry.users -= 1
            if entry.users:
                return
            del self._entries[key]
        if entry.release is not None:
            entry.release(entry.value)


RESOURCES = Resources()
"""The resources of this process."""
