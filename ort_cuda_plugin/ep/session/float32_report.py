"""Warnings about the option ``keep_float32``: entries that name no node, and values that are stored in 16 bits.

ONNX Runtime fuses and renames nodes before it asks the plugin for claims, so an entry that names a node of the model
may name no node that the plugin gets. It asks for bodies before the graph around them, and perhaps for all graphs
again. So the report collects what each request shows, and is written when the plugin compiles the first cluster of the
main graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...abi.message_texts import similar
from ...clusters.claims.claims import NodeVerdict
from ...clusters.nodes.float32_nodes import AUTOMATIC, is_listed, names_of, why_no_float32
from ...model.ir import HALVES, Graph, Node
from .lost_nodes import is_compiled_model

_MAX_NAMES = 3
"""Maximum number of names in a message."""


@dataclass
class _Found:
    """What a request for claims of a graph shows.

    Attributes:
        reasons: for each entry, the labels of its nodes, each with the reason why the node is not computed in float32;
            "" if it is.
        names: the texts with which the option could list nodes.
        boundaries: names of values between listed nodes of different clusters.
    """

    reasons: dict[str, dict[str, str]]
    names: dict[str, None]
    boundaries: list[str]


class Float32Report:
    """The nodes that the entries of ``keep_float32`` name, over all requests for claims."""

    def __init__(self, entries: Sequence[str]) -> None:
        self._entries = [entry for entry in entries if entry != AUTOMATIC]
        self._graphs: dict[tuple[str, ...], _Found] = {}
        """What the last request for each graph has shown, by the names of the graph and of its outputs."""
        self._has_main_graph = self._has_contexts = self._is_written = False

    def add(self, graph: Graph, verdicts: Sequence[NodeVerdict], clusters: Sequence[Sequence[Node]]) -> None:
        """Add what a request for claims shows. ``clusters`` are those that the plugin asks ONNX Runtime to run."""
        if not self._entries:
            return
        self._has_main_graph |= graph.parent is None
        label = "" if graph.parent is None else graph.parent.label
        found = self._graphs[label, *(value.name for value in graph.outputs)] = _Found(
            {entry: {} for entry in self._entries}, {}, [*self._crossing(graph, clusters)]
        )
        judged = zip(graph.nodes, verdicts, strict=True)
        declined = {node: verdict for node, verdict in judged if not verdict.supported}
        compiled = {node for cluster in clusters for node in cluster}
        for top in graph.nodes:
            bodies = [inner for body in top.subgraphs.values() for inner in body.all_nodes()]
            for node in (top, *bodies):
                self._has_contexts |= is_compiled_model(node)
                found.names.update(dict.fromkeys(names_of(node)))
                why = why_no_float32(node)
                if node in declined and not why:
                    why = f"the plugin does not run it: {declined[node].reason}"
                # A request for a body declines nodes that the plugin compiles together with the node around them.
                is_known = node is top or top in compiled
                for reasons in (found.reasons[entry] for entry in self._entries if entry in names_of(node)):
                    reasons[node.label] = why if is_known else reasons.get(node.label, why)

    def _crossing(self, graph: Graph, clusters: Sequence[Sequence[Node]]) -> Iterator[str]:
        """Yield the names of 16-bit values between listed nodes of different clusters."""
        cluster_of = {node: number for number, cluster in enumerate(clusters) for node in cluster}
        listed = {node for node in cluster_of if is_listed(self._entries, node) and not why_no_float32(node)}
        producers = {value: node for node in listed for value in node.outputs if value is not None}
        for node in listed:
            for value in node.inputs:
                producer = None if value is None or value.dtype not in HALVES else producers.get(value)
                if producer is not None and value is not None and cluster_of[producer] != cluster_of[node]:
                    yield value.name

    def warnings(self) -> Iterator[str]:
        """Yield the warnings, once, after the request for the main graph."""
        if not self._has_main_graph or self._is_written:
            return
        self._is_written = True
        for entry in self._entries:
            found: dict[str, str] = {}
            for graph in self._graphs.values():
                found |= graph.reasons[entry]
            if not found and not self._has_contexts:
                yield self._unknown(entry)
            failed = [f"{label}: {why}" for label, why in found.items() if why]
            if failed and (len(failed) == len(found) or any("does not run it" in text for text in failed)):
                more = f"; and {len(failed) - _MAX_NAMES} more nodes" if len(failed) > _MAX_NAMES else ""
                yield f"keep_float32: {entry!r} has no effect on {'; '.join(failed[:_MAX_NAMES])}{more}"
        boundaries = [name for graph in self._graphs.values() for name in graph.boundaries]
        if boundaries:
            shown = ", ".join(map(repr, boundaries[:_MAX_NAMES]))
            more = f" and {len(boundaries) - _MAX_NAMES} more" if len(boundaries) > _MAX_NAMES else ""
            yield (
                "keep_float32: values that pass from a listed node to another in 16 bits, because ONNX Runtime runs "
                f"the two nodes separately: {shown}{more}. Set single_nodes=0, and remove nodes of other providers "
                "between the two nodes"
            )

    def _unknown(self, entry: str) -> str:
        names = {name: None for graph in self._graphs.values() for name in graph.names}
        close = similar(entry, names, most=_MAX_NAMES)
        close += [name for name in names if name.startswith(f"{entry}/") and name not in close]
        hint = f"Similar: {', '.join(map(repr, close[:_MAX_NAMES]))}. " if close else ""
        return (
            f"keep_float32: no node has this name, output or operator type: {entry!r}. {hint}ONNX Runtime may have "
            "fused or renamed the node: ort-cuda-plugin explain MODEL lists the nodes that the plugin gets"
        )
