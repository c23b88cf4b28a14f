"""How much device memory nodes will take, and which of them a budget has room for.

The estimate is ONNX Runtime's for the CUDA execution provider: the bytes of a node's constants, each counted once, and
of its results where their sizes are known, and half as much again for scratch memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..model.ir import Node, Value


class MemoryBudget:
    """A budget of a session: the nodes of its clusters take it up, in the order of the graph.

    Attributes:
        nbytes: all of it.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._spent = 0
        self._counted: set[str] = set()

    def first_beyond(self, nodes: Iterable[Node]) -> Node | None:
        """The first of these nodes for which no room is left; None where they all fit."""
        counted, total = set(self._counted), self._spent
        for node in nodes:
            total += _nbytes(node, counted)
            if total > self.nbytes:
                return node
        return None

    def spend(self, nodes: Iterable[Node]) -> None:
        """These nodes run on the device from now on, whatever the graph looks like later."""
        for node in nodes:
            self._spent += _nbytes(node, self._counted)


def _nbytes(node: Node, counted: set[str]) -> int:
    """What a node takes; ``counted`` has the constants that other nodes took, and gets its own."""
    total = 0
    for value in node.reads():
        if value.initializer is not None and value.name not in counted:
            counted.add(value.name)
            total += value.initializer.nbytes
    total += sum(_size(value) for value in node.outputs if value is not None)
    return total + total // 2


def _size(value: Value) -> int:
    dims = [dim for dim in value.shape or () if isinstance(dim, int)]
    if value.dtype is None or value.shape is None or len(dims) != len(value.shape):
        return 0
    return (math.prod(dims) * value.dtype.bits + 7) // 8
