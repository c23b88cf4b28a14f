"""Finds unprofitable islands: connected parts of clusters that run faster on the CPU, where they need no copies."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Final

from ...model.ir import Graph, Node, Value

CONTROL_FLOW: Final = {"If": 1, "Loop": 2, "Scan": 0}
"""Number of leading inputs of a control-flow node that ORT keeps in host memory.

In a Loop's body, the inputs iteration number and condition, and the output condition, are in host memory too.
"""
_HEAVY: Final = re.compile("MatMul|Gemm|Conv|Attention|LSTM|GRU|RNN|Einsum")
"""Matches the operators whose time on the CPU outweighs any copy."""


def unprofitable_islands(
    graph: Graph, runs_here: bool, clusters: Sequence[Sequence[Node]], ours: Collection[Node]
) -> list[list[Node]]:
    """Return the connected parts of ``clusters`` that copies make slower on the device than on the CPU.

    ``ours`` are all nodes that the plugin runs. ``runs_here`` is False if ``graph`` is the body of a control-flow node
    that the plugin does not run. A part is profitable if it has a heavy operator, more nodes than values to copy, or a
    value that is in device memory anyway.
    """
    borders = _Borders(graph, runs_here, ours)
    parts = [part for cluster in clusters for part in _connected(cluster)]
    return [
        part
        for part in parts
        if len(part) <= borders.copies(part) and not any(_HEAVY.search(node.op_type) for node in part)
    ]


def _connected(cluster: Sequence[Node]) -> list[list[Node]]:
    """Return the connected parts of a cluster: groups of nodes that read each other's results."""
    producers = {value: node for node in cluster for value in node.outputs if value is not None}
    leaders: dict[Node, Node] = {}

    def leader(node: Node) -> Node:
        while node in leaders:
            above = leaders[node]
            leaders[node] = leaders.get(above, above)
            node = above
        return node

    for node in cluster:
        for value in node.reads():
            if value in producers and (source := leader(producers[value])) is not leader(node):
                leaders[leader(node)] = source
    parts: dict[Node, list[Node]] = {}
    for node in cluster:
        parts.setdefault(leader(node), []).append(node)
    return list(parts.values())


class _Borders:
    """Finds the inputs and results of a connected part of a cluster that would be copied between host and device."""

    def __init__(self, graph: Graph, runs_here: bool, ours: Collection[Node]) -> None:
        self.graph = graph
        self.runs_here = runs_here
        self.in_loop = graph.parent is not None and graph.parent.op_type == "Loop"
        self.ours = ours
        self.producers = graph.producers()
        self.readers: dict[Value, list[Node]] = {}
        for node in graph.nodes:
            for value in node.reads():
                self.readers.setdefault(value, []).append(node)

    def copies(self, part: Sequence[Node]) -> int:
        """Count the values to copy for a connected part; 0 if an input is on the device, or a result is read there."""
        members = set(part)
        given = {value for node in part for value in node.outputs if value is not None}
        read = {value for node in part for value in node.reads() if value not in given and value.initializer is None}
        used = {
            value
            for value in given
            if value in self.graph.outputs or any(reader not in members for reader in self.readers.get(value, []))
        }
        if not used or not all(map(self._comes_from_host, read)):
            return 0
        return len(read) + len(used) if all(self._goes_to_host(value, members) for value in used) else 0

    def _comes_from_host(self, value: Value) -> bool:
        producer = self.producers.get(value)
        if producer is not None:
            return producer not in self.ours
        if not self.runs_here:
            return True
        return self.in_loop and value in self.graph.inputs[: CONTROL_FLOW["Loop"]]

    def _goes_to_host(self, value: Value, members: Collection[Node]) -> bool:
        for_device = self.graph.outputs[int(self.in_loop) :] if self.runs_here else []
        if value in for_device:
            return False
        readers = [reader for reader in self.readers.get(value, []) if reader not in members]
        return all(reader not in self.ours or _only_for_host(reader, value) for reader in readers)


def _only_for_host(reader: Node, value: Value) -> bool:
    """Return whether ``reader``, a node that the plugin runs, reads ``value`` in host memory only."""
    count = CONTROL_FLOW.get(reader.op_type, 0) if reader.has_subgraphs else 0
    return value in reader.inputs[:count] and value not in (*reader.inputs[count:], *reader.implicit_inputs)
