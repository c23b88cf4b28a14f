"""Groups claimed nodes into clusters, each of which becomes one fused node.

Clusters are convex and have no joint cycle: contracting all of them at once leaves a graph without cycles. That is
stronger than convexity of each, and what ORT needs.
"""

from __future__ import annotations

from collections.abc import Sequence

from .ir import Graph, Node


def partition(graph: Graph, claimed: Sequence[bool]) -> list[list[Node]]:
    """Clusters of the nodes whose entry in ``claimed`` is true, each in topological order, in order of first nodes.

    ``graph.nodes`` must be in topological order. No two clusters of the result could be merged.

    A node's level counts the changes between claimed and other nodes on the way to it: claimed nodes have odd levels.
    Those of one level are a cluster, since edges lead up, or from claimed to claimed on a level. Between two clusters
    lies a node that is not claimed, by the definition of the higher one's level.
    """
    producers = graph.producers()
    sources = {node: {producers[value] for value in node.reads() if value in producers} for node in graph.nodes}
    is_claimed = dict(zip(graph.nodes, claimed, strict=True))
    levels: dict[Node, int] = {}
    for node in graph.nodes:
        least = int(is_claimed[node])
        levels[node] = max((_level_after(levels[source], is_claimed[node]) for source in sources[node]), default=least)
    # What reads no cluster moves up to where it is first read, so that its results cross no border on the way. So does
    # what makes a sequence: that costs nothing, and a sequence can cross no border.
    latest: dict[Node, int] = {}
    for node in reversed(graph.nodes):
        makes_container = any(value is not None and value.is_container for value in node.outputs)
        if levels[node] == 1 or (is_claimed[node] and makes_container):
            levels[node] = latest.get(node, levels[node])
        for source in sources[node]:
            bound = levels[node] if is_claimed[node] else levels[node] - 1
            latest[source] = min(latest.get(source, bound), bound)
    clusters: dict[int, list[Node]] = {}
    for node in graph.nodes:
        if is_claimed[node]:
            clusters.setdefault(levels[node], []).append(node)
    return list(clusters.values())


def _level_after(level: int, is_claimed: bool) -> int:
    """The lowest level of a node that reads one of ``level``."""
    return level if level % 2 == is_claimed else level + 1
