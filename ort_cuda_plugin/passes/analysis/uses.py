"""Def-use chains: the steps that write and the steps that read each buffer."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from ...program.steps.steps import Map
from ...program.steps.tensor import Buffer, BufferKind
from ...program.steps.trace import Step

User = TypeVar("User", bound=Hashable)


class Uses(Generic[User]):
    """The users of each buffer, in the order of `enter`. A user is a step, or the position of a step in the program."""

    def __init__(self, steps: Iterable[tuple[User, Step]]) -> None:
        # `leave` takes constant time with dictionaries, even for a weight that every step reads; with lists it would
        # not.
        self._writers: dict[Buffer, dict[User, None]] = {}
        self._readers: dict[Buffer, dict[User, None]] = {}
        for user, step in steps:
            self.enter(user, step)

    def enter(self, user: User, step: Step) -> None:
        """Add ``user`` to the writers and readers of the buffers that ``step`` writes and reads."""
        for buffer in step.writes:
            self._writers.setdefault(buffer, {})[user] = None
        for buffer in step.reads:
            self._readers.setdefault(buffer, {})[user] = None

    def leave(self, user: User, step: Step) -> None:
        """Remove ``user`` from the writers and readers of the buffers that ``step`` writes and reads."""
        for buffer in step.writes:
            del self._writers[buffer][user]
        for buffer in step.reads:
            del self._readers[buffer][user]

    def writers(self, buffer: Buffer) -> Sequence[User]:
        return tuple(self._writers.get(buffer, ()))

    def readers(self, buffer: Buffer) -> Collection[User]:
        return self._readers.get(buffer, {}).keys()

    def users(self, buffer: Buffer) -> list[User]:
        """Return the writers and readers of ``buffer``, each once."""
        return list(dict.fromkeys((*self.writers(buffer), *self.readers(buffer))))

    def replaceable_writer(self, buffer: Buffer, reader: User, step: Map) -> User | None:
        """Return the only writer of ``buffer`` if a fusion of it into ``step`` may remove the writer, else None.

        A fusion may remove the writer of an intermediate that has one writer and that only ``step`` reads, once.
        ``reader`` is the `User` as which ``step`` was entered.
        """
        if buffer.kind is not BufferKind.SCRATCH or list(self.readers(buffer)) != [reader]:
            return None
        writers = self.writers(buffer)
        return writers[0] if len(writers) == 1 and step.reads_once(buffer) else None
