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
    """
    groups = _Groups()
    group_of: dict[Node, int] = {}
    producers = graph.producers()
    for node, claim in zip(graph.nodes, claimed, strict=True):
        sources = {group_of[producers[value]] for value in node.reads() if value in producers}
        group = _choose(groups, sources) if claim else None
        if group is None:
            group = groups.add(is_cluster=claim)
        group_of[node] = group
        groups.depend(group, sources)
    merged = groups.merge_clusters()
    clusters: dict[int, list[Node]] = {}
    for node, claim in zip(graph.nodes, claimed, strict=True):
        if claim:
            clusters.setdefault(merged[group_of[node]], []).append(node)
    return list(clusters.values())


def _choose(groups: _Groups, sources: set[int]) -> int | None:
    """The cluster that a node joins: one that it reads from where possible, else the newest one that it may join."""
    others = (group for group in reversed(groups.clusters) if group not in sources)
    for group in (*sorted(sources & set(groups.clusters), reverse=True), *others):
        if groups.may_depend(group, sources):
            return group
    return None


class _Groups:
    """The contracted graph: clusters, and nodes that nobody claims as groups of one. Sets of groups are bit masks."""

    def __init__(self) -> None:
        self.ancestors: list[int] = []
        self.clusters: list[int] = []

    def add(self, is_cluster: bool) -> int:
        self.ancestors.append(0)
        group = len(self.ancestors) - 1
        if is_cluster:
            self.clusters.append(group)
        return group

    def may_depend(self, group: int, sources: set[int]) -> bool:
        """Whether ``group`` can read from ``sources`` without a cycle: none of them depends on it."""
        return not any(self.ancestors[source] >> group & 1 for source in sources if source != group)

    def depend(self, group: int, sources: set[int]) -> None:
        new = 0
        for source in sources:
            if source != group:
                new |= self.ancestors[source] | 1 << source
        if new & ~self.ancestors[group]:
            self.ancestors[group] |= new
            for other, known in enumerate(self.ancestors):
                if known >> group & 1:
                    self.ancestors[other] |= new

    def merge_clusters(self) -> dict[int, int]:
        """Merges clusters while any two can be; gives the surviving group of each group."""
        survivor = {group: group for group in range(len(self.ancestors))}
        changed = True
        while changed:
            changed = False
            for second in list(self.clusters):
                for first in self.clusters:
                    if first != second and second in self.clusters and self._mergeable(first, second):
                        self._merge(first, second)
                        for group, target in survivor.items():
                            if target == second:
                                survivor[group] = first
                        changed = True
                        break
        return survivor

    def _mergeable(self, first: int, second: int) -> bool:
        """Whether no path between the two leads through a third group."""
        for above, below in ((first, second), (second, first)):
            between = self.ancestors[below] & ~(1 << above)
            while between:
                middle = between.bit_length() - 1
                if self.ancestors[middle] >> above & 1:
                    return False
                between &= ~(1 << middle)
        return True

    def _merge(self, first: int, second: int) -> None:
        both = 1 << first | 1 << second
        combined = (self.ancestors[first] | self.ancestors[second]) & ~both
        self.ancestors[first] = combined
        self.ancestors[second] = 0
        for other, known in enumerate(self.ancestors):
            if other != first and known & both:
                self.ancestors[other] = known & ~(1 << second) | 1 << first | combined
        self.clusters.remove(second)
