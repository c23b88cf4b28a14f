"""Def-use chains: which steps write and which read a buffer."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from ...program.steps.tensor import Buffer
from ...program.steps.trace import Step

User = TypeVar("User", bound=Hashable)


class Uses(Generic[User]):
    """The users of each buffer, in the order in which they were entered: steps themselves, or their positions."""

    def __init__(self, steps: Iterable[tuple[User, Step]]) -> None:
        self._writers: dict[Buffer, list[User]] = {}
        self._readers: dict[Buffer, list[User]] = {}
        for user, step in steps:
            self.enter(user, step)

    def enter(self, user: User, step: Step) -> None:
        """Record that ``user`` now executes ``step``."""
        for buffer in step.writes:
            self._writers.setdefault(buffer, []).append(user)
        for buffer in step.reads:
            self._readers.setdefault(buffer, []).append(user)

    def leave(self, user: User, step: Step) -> None:
        """Remove ``user`` from the users of its step's buffers."""
        for buffer in step.writes:
            self._writers[buffer].remove(user)
        for buffer in step.reads:
            self._readers[buffer].remove(user)

    def writers(self, buffer: Buffer) -> Sequence[User]:
        return self._writers.get(buffer, ())

    def readers(self, buffer: Buffer) -> Sequence[User]:
        return self._readers.get(buffer, ())

    def users(self, buffer: Buffer) -> list[User]:
        """Return writers and readers, each once."""
        return list(dict.fromkeys((*self.writers(buffer), *self.readers(buffer))))
