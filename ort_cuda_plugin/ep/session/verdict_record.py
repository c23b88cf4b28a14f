"""Records where each node of a session runs, and why. ONNX Runtime asks for claims several times for one session."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from ...clusters.claims.claims import NodeVerdict
from ...model.ir import Graph, Node, Value

_GraphKey: TypeAlias = "tuple[tuple[str, ...], int]"


class VerdictRecord:
    """The verdicts of a session. ORT asks for claims of bodies before the graph around them, and may ask for all graphs
    again.

    Attributes:
        verdicts: one per node of the main graph, and then of the bodies in it.
        values: the type and shape of each value of these nodes, as text.
    """

    def __init__(self, ep_name: str) -> None:
        self.verdicts: list[NodeVerdict] = []
        self.values: dict[str, str] = {}
        self._ep_name = ep_name
        self._to_fuse: list[NodeVerdict] = []  # verdicts of nodes in clusters that ORT was last asked to fuse
        self._fused: list[NodeVerdict] = []  # verdicts of nodes that fused nodes have replaced
        self._shown: dict[_GraphKey, list[NodeVerdict]] = {}  # verdicts of nodes that are not fused, by graph
        # Graphs that ORT has shown since the last main graph. The two bodies of an If may have equal names.
        self._asked: list[_GraphKey] = []
        self._last: _GraphKey | None = None

    def add(self, graph: Graph, verdicts: Sequence[NodeVerdict], fused: Sequence[Sequence[Node]]) -> None:
        """Record the verdicts for a graph. ``fused`` are the clusters that ORT is asked to fuse."""
        label = "" if graph.parent is None else graph.parent.label
        given = {
            node: replace(verdict, body_of=label, inputs=_names(node.reads()), outputs=_names(node.outputs))
            for node, verdict in zip(graph.nodes, verdicts, strict=True)
        }
        for node in graph.nodes:
            self.values.update((value.name, _type(value)) for value in (*node.reads(), *node.outputs) if value)
        self._to_fuse = [given[node] for cluster in fused for node in cluster]
        names = (label, *(value.name for value in graph.outputs))
        key = self._last = (names, sum(asked == names for asked, _ in self._asked))
        self._asked.append(key)
        if not label:  # ORT has removed bodies that it did not show again
            self._shown = {asked: self._shown.get(asked, []) for asked in self._asked}
            self._asked = []
        inlined = {label for cluster in fused for node in cluster for label in _labels_with_bodies(node)}
        for others in self._shown.values():
            others[:] = [
                replace(verdict, supported=True, kind="", reason="") if verdict.body_of in inlined else verdict
                for verdict in others
            ]
        # A declined node that ORT has already assigned to the plugin is a fused node, which `_fused` covers.
        self._shown[key] = [
            verdict for node, verdict in given.items() if verdict.supported or node.provider != self._ep_name
        ]
        shown = [verdict for others in self._shown.values() for verdict in others]
        self.verdicts = sorted(self._fused + shown, key=lambda verdict: verdict.body_of != "")

    def fused(self, clusters: Mapping[str, Graph], devices: Mapping[str, int]) -> None:
        """Record that ORT has replaced the latest clusters by fused nodes with these names.

        ``devices`` has the ordinal of the device of each cluster, if the session has several devices.
        """
        cluster_of = {_names(node.outputs): name for name, graph in clusters.items() for node in graph.nodes}
        replaced = {
            id(verdict): replace(verdict, cluster=name, device=devices.get(name))
            for verdict in self._to_fuse
            for name in [cluster_of.get(verdict.outputs, "")]
        }
        self._fused += [replaced[id(verdict)] for verdict in self._to_fuse]
        self._to_fuse = []
        self.verdicts[:] = [replaced.get(id(verdict), verdict) for verdict in self.verdicts]
        if self._last is not None:
            self._shown[self._last] = [verdict for verdict in self._shown[self._last] if id(verdict) not in replaced]


def _names(values: Iterable[Value | None]) -> tuple[str, ...]:
    return tuple(value.name for value in values if value is not None and value.initializer is None)


def _type(value: Value) -> str:
    """Return type and shape as ``FLOAT[2, n]``; "" if the type is unknown."""
    if value.dtype is None:
        return ""
    shape = "[...]" if value.shape is None else "[" + ", ".join("?" if d is None else str(d) for d in value.shape) + "]"
    return f"{value.dtype.name}{shape}"


def _labels_with_bodies(node: Node) -> Iterator[str]:
    """Yield the label of ``node`` if it has bodies, and the labels of the nodes with bodies inside them."""
    for body in node.subgraphs.values():
        yield node.label
        for member in body.nodes:
            yield from _labels_with_bodies(member)
