"""Termination measures: a loop whose measure does not decrease raises an error instead of running forever.

A measure is a number, or a tuple compared lexicographically, that decreases with each iteration and is bounded below,
such as the number of remaining steps. Therefore session creation ends for every model.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from ..abi.errors import Error
from ..model.ir import Node

Number = TypeVar("Number", int, tuple[int, ...])


class NoProgressError(Error, RuntimeError):
    """A loop of session creation makes no progress: a bug of the plugin."""


class Measure(Generic[Number]):
    """The termination measure of one loop in the pass ``name``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._last: Number | None = None

    def fall(self, value: Number, node: Node | None = None) -> None:
        """Record the measure ``value`` at the start of an iteration. Raises NoProgressError unless it has decreased."""
        if self._last is not None and value >= self._last:
            where = f" at node {node.label}" if node is not None else ""
            raise NoProgressError(
                f"{self.name}{where}: an iteration made no progress: got the measure {value}, expected less than"
                f" {self._last}. Report the model; the session option fusion=0 disables most passes"
            )
        self._last = value
