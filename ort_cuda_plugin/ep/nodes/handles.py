"""Handles: integers by which C refers to Python objects, so that no pointer to an object leaves Python."""

from __future__ import annotations

import itertools
from typing import Generic, TypeVar

T = TypeVar("T")


class HandleTable(Generic[T]):
    """Assigns numbers, starting at 1, to live objects. Thread safe, if no two threads remove the same object."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._next = itertools.count(1)
        self._objects: dict[int, T] = {}

    def add(self, value: T) -> int:
        handle = next(self._next)
        self._objects[handle] = value
        return handle

    def __getitem__(self, handle: int) -> T:
        try:
            return self._objects[handle]
        except KeyError:
            raise LookupError(f"{self._what} {handle} does not exist any more") from None

    def pop(self, handle: int) -> T:
        value = self[handle]
        del self._objects[handle]
        return value

    def values(self) -> list[T]:
        return list(self._objects.values())

    def __len__(self) -> int:
        return len(self._objects)
