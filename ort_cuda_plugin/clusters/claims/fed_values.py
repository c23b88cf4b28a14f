"""Data dependence on fed values: finds the values of a graph that depend on contents of inputs, not only on sizes.

A CUDA graph of a whole Run repeats the values that the host read during capture. A replay is correct for values
derived from sizes, which do not change, and wrong for values derived from contents.
"""

from __future__ import annotations

from ...model.ir import Graph
from ...ops.kernel_definitions import HOST_RESULTS


def fed_values(graph: Graph) -> set[str]:
    """Return the names of the graph's inputs, and of all values computed from their elements.

    Shape and Size read only the sizes of their inputs, so their results do not count.
    """
    found = {value.name for value in graph.inputs if value.initializer is None}
    for node in graph.nodes:
        if node.domain == "" and node.op_type in HOST_RESULTS:
            continue
        read = (*node.inputs, *node.implicit_inputs)
        if any(value is not None and value.name in found for value in read):
            found.update(value.name for value in node.outputs if value is not None)
    return found
