"""Memory budget of a session: estimates the device memory of nodes, and limits claims to the budget.

The estimate for a node follows ONNX Runtime's estimate for its CUDA execution provider: the bytes of the node's
constants, each counted once per session, and of its results with known sizes, plus 50 % for scratch memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ...model.ir import Node, Value


class MemoryBudget:
    """Memory budget of a session: ``nbytes`` bytes of device memory, which claimed nodes spend in graph order."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._spent = 0
        self._counted: set[str] = set()

    def first_beyond(self, nodes: Iterable[Node]) -> Node | None:
        """Return the first of ``nodes`` that does not fit in the remaining budget, None if all fit."""
        counted, total = set(self._counted), self._spent
        for node in nodes:
            total += _nbytes(node, counted)
            if total > self.nbytes:
                return node
        return None

    def spend(self, nodes: Iterable[Node]) -> None:
        """Spend the estimated bytes of ``nodes``, which the plugin runs.

        The budget gets no bytes back if a later change of the graph removes nodes.
        """
        for node in nodes:
            self._spent += _nbytes(node, self._counted)


def _nbytes(node: Node, counted: set[str]) -> int:
    """Return the estimate for a node: the bytes of its results and of its constants not in ``counted``, plus 50 %.

    Adds the names of these constants to ``counted``.
    """
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
