"""Groups claimed nodes into clusters, each of which becomes one fused node.

Clusters are convex and have no joint cycle: contracting all of them at once leaves a graph without cycles. That is
stronger than convexity of each, and ORT requires it.
"""

from __future__ import annotations

from collections.abc import Sequence

from .ir import Graph, Node


def partition(graph: Graph, claimed: Sequence[bool]) -> list[list[Node]]:
    """Return clusters of the nodes whose entry in ``claimed`` is true, each in topological order, ordered by their
    first nodes.

    ``graph.nodes`` must be in topological order. No two clusters of the result could be merged.

    A node's level counts the changes between claimed and other nodes on the way to it: claimed nodes have odd levels.
    Those of one level are a cluster, since edges lead up, or from claimed to claimed on a level. Two clusters cannot be
    merged: by the definition of levels, an unclaimed node lies between them.
    """
    producers = graph.producers()
    sources = {node: {producers[value] for value in node.reads() if value in producers} for node in graph.nodes}
    is_claimed = dict(zip(graph.nodes, claimed, strict=True))
    levels: dict[Node, int] = {}
    for node in graph.nodes:
        least = int(is_claimed[node])
        levels[node] = max((_level_after(levels[source], is_claimed[node]) for source in sources[node]), default=least)
    # A node that reads no cluster's result moves up to its first reader's level, so its results cross no border on the
    # way. So does a node that makes a sequence: it costs nothing, and a sequence cannot cross a border.
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
    """Return the lowest level of a node that reads a result of a node on ``level``."""
    return level if level % 2 == is_claimed else level + 1
