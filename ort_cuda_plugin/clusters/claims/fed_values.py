"""Finds the values of a graph whose contents depend on contents that an application feeds, and not on sizes alone.

A CUDA graph of a whole Run repeats what the host read when it was captured. That is right for sizes, which a replay
cannot change, and wrong for contents.
"""

from __future__ import annotations

from ...model.ir import Graph
from ...ops.kernel_definitions import HOST_RESULTS


def fed_values(graph: Graph) -> set[str]:
    """Return the names of these values: inputs of the graph, and everything computed from their elements."""
    found = {value.name for value in graph.inputs if value.initializer is None}
    for node in graph.nodes:
        if node.domain == "" and node.op_type in HOST_RESULTS:
            continue
        read = (*node.inputs, *node.implicit_inputs)
        if any(value is not None and value.name in found for value in read):
            found.update(value.name for value in node.outputs if value is not None)
    return found
