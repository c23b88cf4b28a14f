"""Partitioning of claimed nodes into clusters, each of which becomes one fused node.

Contracting all clusters at once leaves an acyclic graph. ORT requires this, and it is stronger than convexity of each
cluster.
"""

from __future__ import annotations

from collections.abc import Sequence

from .ir import Graph, Node


def partition(graph: Graph, claimed: Sequence[bool]) -> list[list[Node]]:
    """Return clusters of the nodes whose entry in ``claimed`` is true.

    Each cluster is in topological order, and clusters are ordered by their first nodes.

    ``graph.nodes`` must be in topological order. No two clusters of the result could be merged.

    The level of a node is the maximum number of changes between claimed and unclaimed nodes on a path to it from a
    graph input, which counts as unclaimed. So claimed nodes have odd levels. The claimed nodes of a level are a
    cluster: an edge leads to a higher level or stays within a cluster. Merging two clusters would create a cycle
    through an unclaimed node between them.
    """
    producers = graph.producers()
    sources = {node: {producers[value] for value in node.reads() if value in producers} for node in graph.nodes}
    is_claimed = dict(zip(graph.nodes, claimed, strict=True))
    levels: dict[Node, int] = {}
    for node in graph.nodes:
        least = int(is_claimed[node])
        levels[node] = max((_level_after(levels[source], is_claimed[node]) for source in sources[node]), default=least)
    # A claimed node of level 1 depends on no other cluster, so it may run later: move it to the level of its first
    # reader, so that its results need not leave a cluster. A producer of a sequence must move: no sequence can leave.
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
