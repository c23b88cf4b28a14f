"""Pipeline stages: splits the nodes of a cluster by the devices that run them.

A *stage* is a set of nodes of one device that runs as one cluster. The stages of a cluster are in an order in which
each stage reads only inputs of the cluster and results of earlier stages.

A node that depends only on shapes and constants, such as Shape or the Concat that computes the target shape of a
Reshape, is a *repeated node*. It is assigned to no device: each stage that reads its result computes it again. So sizes
stay symbolic in each stage, and the host need not read them from another device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..model.ir import Graph, Node, Value

_SHAPES_ONLY = frozenset({"Shape", "Size"})
"""Operators of ai.onnx that use the shape of their input, but not its contents."""

_VARYING = frozenset({"Bernoulli", "Dropout", "Multinomial"})
"""Operators of ai.onnx whose result may differ if a node is computed twice; in addition to those named Random...."""


class StageError(Exception):
    """The nodes cannot be split over the devices. The message says why, and what to do."""


@dataclass(frozen=True)
class Stage:
    """One stage of a cluster.

    Attributes:
        device: the index of its device in the session's list.
        graph: its nodes, inputs and outputs.
        only_shapes: the inputs whose contents it does not use.
    """

    device: int
    graph: Graph
    only_shapes: frozenset[Value]


def placed_nodes(graph: Graph) -> list[Node]:
    """Return the nodes that a split assigns to a device.

    These are the nodes that depend on the contents of inputs, and the nodes that compute an output of the graph.
    """
    repeated = _repeated_nodes(graph)
    outputs = set(graph.outputs)
    return [node for node in graph.nodes if node not in repeated or not outputs.isdisjoint(node.outputs)]


def split(
    graph: Graph, inputs: Sequence[Value], outputs: Sequence[Value], device_of: Mapping[Node, int]
) -> list[Stage]:
    """Return the stages of a cluster. ``device_of`` has the index of the device of each of `placed_nodes`.

    The level of a node is the maximum number of changes of the device on a path to it. A stage has the nodes of one
    level and device. An edge between two stages leads to a higher level, so the stages can run in the order of levels.

    Raises:
        StageError: a sequence or another value that is not a tensor would cross between two stages.
    """
    repeated = _repeated_nodes(graph)
    makers = {value: node for node in repeated for value in node.outputs if value is not None}
    producers = {
        value: node for node in graph.nodes if node in device_of for value in node.outputs if value is not None
    }
    levels: dict[Node, int] = {}
    for node in graph.nodes:
        if node not in device_of:
            continue
        sources = {producers[value] for value in _needed(node, makers) if value in producers}
        levels[node] = max((levels[source] + (device_of[source] != device_of[node]) for source in sources), default=0)
    groups: dict[tuple[int, int], set[Node]] = {}
    for node in levels:
        groups.setdefault((levels[node], device_of[node]), set()).add(node)
    members = {key: _with_repeated(group, makers) for key, group in sorted(groups.items())}
    entering = {key: _read_from_outside(nodes) for key, nodes in members.items()}
    stages: list[Stage] = []
    known = [*inputs]
    for key, nodes in members.items():
        elsewhere = set(outputs).union(*(read for other, read in entering.items() if other != key))
        own = [value for node in graph.nodes if node in groups[key] for value in node.outputs]
        results = [value for value in own if value is not None and value in elsewhere]
        _require_tensors(results)
        part = Graph(
            graph.name,
            [node for node in graph.nodes if node in nodes],
            [value for value in known if value in entering[key]],
            results,
            graph.opsets,
            operators=graph.operators,
        )
        known += results
        stages.append(Stage(key[1], part, frozenset(v for v in part.inputs if _is_only_measured(v, nodes))))
    return [stage for stage in stages if stage.graph.outputs]


def _read_from_outside(nodes: Iterable[Node]) -> set[Value]:
    """Return the values that the nodes read, without constants and without values that the nodes compute."""
    nodes = list(nodes)
    made = {value for node in nodes for value in node.outputs}
    return {value for node in nodes for value in node.reads() if value not in made and value.initializer is None}


def _require_tensors(crossing: Iterable[Value]) -> None:
    for value in crossing:
        if value.is_container or value.dtype is None or not value.dtype.is_supported:
            raise StageError(
                f"value {value.name!r} would cross between devices, but is not a tensor of numbers. Assign the nodes "
                "that compute and read it to one device with the option device_of"
            )


def _is_only_measured(value: Value, nodes: Iterable[Node]) -> bool:
    """Return whether all of the nodes that read the value use only its shape."""
    readers = [node for node in nodes if value in node.reads()]
    return all(not node.domain and node.op_type in _SHAPES_ONLY for node in readers)


def _repeated_nodes(graph: Graph) -> set[Node]:
    """Return the nodes that depend only on shapes and constants, and whose results do not vary."""
    found: set[Node] = set()
    values: set[Value] = set()
    for node in graph.nodes:
        measures = not node.domain and node.op_type in _SHAPES_ONLY
        if node.domain or node.has_subgraphs or node.op_type in _VARYING or node.op_type.startswith("Random"):
            continue
        if any(value is not None and value.is_container for value in node.outputs):
            continue
        if measures or all(value in values or value.initializer is not None for value in node.reads()):
            found.add(node)
            values.update(value for value in node.outputs if value is not None)
    return found


def _with_repeated(nodes: Iterable[Node], makers: Mapping[Value, Node]) -> set[Node]:
    """Return ``nodes`` and the repeated nodes whose results they need.

    A repeated node that computes an output of the graph is assigned to a stage, and repeated in the other stages that
    need its results.
    """
    found = set(nodes)
    pending = list(found)
    while pending:
        for value in pending.pop().reads():
            maker = makers.get(value)
            if maker is not None and maker not in found:
                found.add(maker)
                pending.append(maker)
    return found


def _needed(node: Node, makers: Mapping[Value, Node]) -> set[Value]:
    """Return the values that a node needs from other nodes, directly or through repeated nodes."""
    needed: set[Value] = set()
    for member in _with_repeated([node], makers):
        needed.update(value for value in member.reads() if value not in makers)
    return needed
