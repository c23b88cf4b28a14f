"""Termination measures: a loop whose measure does not fall raises an error, where it would else go on for ever.

A measure is a number, or a tuple of them that is compared from the left, that falls with each turn of a loop and cannot
fall for ever, such as the number of steps that are left. Session creation then ends for every model.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from ..model.ir import Node

Number = TypeVar("Number", int, tuple[int, ...])


class NoProgressError(RuntimeError):
    """A loop of session creation would not end: a mistake in the plugin."""


class Measure(Generic[Number]):
    """The termination measure of one loop of the pass ``name``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._last: Number | None = None

    def fall(self, value: Number, node: Node | None = None) -> None:
        """Notes the measure at the beginning of a turn, which is about ``node``.

        Raises NoProgressError where it is not less than that of the turn before.
        """
        if self._last is not None and value >= self._last:
            where = f" at node {node.label}" if node is not None else ""
            raise NoProgressError(
                f"{self.name}{where}: a turn of its loop made no progress: got a measure of {value}, expected less than"
                f" {self._last}. Report the model; the session option fusion=0 leaves out most passes"
            )
        self._last = value
