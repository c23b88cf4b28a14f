"""Weight budget of a session: divides the option ``weight_budget`` among the fused nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...clusters.search.search import is_search
from ...context.reader import Loaded, StoredCluster
from ...model.ir import Graph
from ...plan.placement import BudgetShare
from ...plugin_library import EP_NAME
from ..options.options import OptionError

_CREATED = 256 * 1024
"""Bytes assumed for each fused node's constants that operators create, such as tables. These count as weights too."""


class SessionWeightBudget:
    """The bytes of device memory that a session may use for weights.

    ``budget`` is a number of bytes, as a float a share of the device's ``memory_bytes``, or None: no limit.
    """

    def __init__(self, budget: int | float | None, memory_bytes: int) -> None:
        self._budget = int(budget * memory_bytes) if isinstance(budget, float) else budget
        self._earlier = 0  # bytes of weights of earlier calls of `divide`
        self._shares: dict[str, BudgetShare] = {}

    def divide(self, names: Sequence[str], graphs: Sequence[Graph], loaded: Mapping[int, Loaded]) -> None:
        """Divide the budget among the fused nodes that ONNX Runtime compiles in one call.

        Shares are proportional to the bytes of weights. ``loaded`` are the nodes from compiled models, by index. ONNX
        Runtime compiles bodies of control flow before the surrounding graph, whose plan may contain the bodies again.
        If bodies have weights, the weights of both must fit into the budget.

        Raises: OptionError: a node cannot stream weights, or weights in bodies and in the surrounding graph exceed the
            budget.
        """
        if self._budget is None:
            return
        for search in (graph.nodes[0] for graph in graphs if is_search(graph.nodes[0])):
            raise OptionError(
                f"{EP_NAME} option weight_budget: the plugin cannot stream the weights of {search.op_type}. Leave "
                "weight_budget out"
            )
        sizes = [_weight_bytes(graph, loaded.get(index)) for index, graph in enumerate(graphs)]
        if self._earlier and sum(sizes) and self._earlier + sum(sizes) > self._budget:
            raise OptionError(
                f"{EP_NAME} option weight_budget: weights in bodies of If, Loop or Scan have {self._earlier} bytes and "
                f"weights of the graph around the bodies {sum(sizes)} bytes, together more than the budget of "
                f"{self._budget} bytes. The plugin cannot stream weights of bodies: raise weight_budget or leave it out"
            )
        total = sum(sizes) + _CREATED * len(sizes)
        shares = [BudgetShare(self._budget, nbytes + _CREATED, total, self._earlier) for nbytes in sizes]
        self._shares = dict(zip(names, shares, strict=True))
        self._earlier += sum(sizes)

    def share(self, name: str) -> BudgetShare | None:
        """Return the budget for the weights of a fused node; None: no limit."""
        return self._shares.get(name)


def _weight_bytes(graph: Graph, loaded: Loaded | None) -> int:
    """Return the bytes of a fused node's weights, as far as they are known before its plans exist."""
    if loaded is not None and isinstance(loaded.cluster, StoredCluster):
        return loaded.cluster.weight_bytes
    return sum(constant.nbytes for constant in {value.initializer for value in graph.used_values} if constant)
