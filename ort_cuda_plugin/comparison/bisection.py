"""Finds the first node whose result differs, by bisection of the graph.

Each iteration runs a prefix of the graph, as a separate model, on the plugin and on the reference provider. Its outputs
are all values that the rest of the graph or the application reads. If the outputs agree, the difference comes later.
Additional outputs keep nodes from being fused, so a difference that only fusion causes may disappear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx

from .differences import Difference, differences

Run = Callable[[onnx.ModelProto, Sequence[str], Mapping[str, Any]], list[Any]]
"""Type of a function that runs a model with one provider: (model, names of outputs, inputs) -> outputs."""


@dataclass(frozen=True)
class FirstDifference:
    """The first node that differs.

    ``found`` are the differences of the model that ends with the node. ``alone`` are the node's differences if both
    providers compute it from the reference's values. If ``alone`` is empty, the node only amplifies small differences
    of earlier nodes.
    """

    number: int
    name: str
    op_type: str
    found: list[Difference]
    alone: list[Difference]


def first_difference(
    model: onnx.ModelProto,
    feeds: Mapping[str, Any],
    own: Run,
    reference: Run,
    tolerances: Mapping[str, float],
    progress: Callable[[int, int], None] = lambda low, high: None,
) -> FirstDifference | None:
    """Return the first node that differs, or None if the results agree.

    ``progress(low, high)``: the model cut after ``low`` nodes agrees, the model cut after ``high`` nodes differs.
    """
    nodes = model.graph.node

    def differing(count: int) -> list[Difference]:
        cut, names = prefix(model, count)
        given = {name: feeds[name] for name in feeds if name in {value.name for value in cut.graph.input}}
        found = differences(names, own(cut, names, given), reference(cut, names, given), tolerances)
        return [difference for difference in found if not difference.is_small]

    low, high = 0, len(nodes)  # the model cut after `low` nodes agrees, after `high` nodes it differs
    found = differing(high)
    if not found:
        return None
    while high - low > 1:
        progress(low, high)
        middle = (low + high) // 2
        if here := differing(middle):
            high, found = middle, here
        else:
            low = middle
    node = nodes[high - 1]
    label = node.name or next((name for name in node.output if name), "(unnamed)")
    alone = _alone(model, high - 1, feeds, own, reference, tolerances)
    return FirstDifference(high - 1, label, node.op_type, found, alone)


def prefix(model: onnx.ModelProto, count: int) -> tuple[onnx.ModelProto, list[str]]:
    """Return a model of the first ``count`` nodes, and the names of its outputs.

    The outputs are the values that later nodes or the application read.
    """
    graph = model.graph
    made = [name for node in graph.node[:count] for name in node.output if name]
    read = {name for node in graph.node[count:] for name in reads(node)} | {value.name for value in graph.output}
    names = [name for name in made if name in read]
    return _model_of(model, list(graph.node[:count]), [value.name for value in graph.input], names), names


def reads(node: onnx.NodeProto) -> Iterator[str]:
    """Return the names of the values that a node and its bodies read."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        for body in (attribute.g, *attribute.graphs):
            for inner in body.node:
                yield from reads(inner)
            yield from (value.name for value in body.output)


def _alone(
    model: onnx.ModelProto,
    number: int,
    feeds: Mapping[str, Any],
    own: Run,
    reference: Run,
    tolerances: Mapping[str, float],
) -> list[Difference]:
    """Run node ``number`` alone on both sides with the reference's inputs; return differences beyond the tolerances."""
    node = model.graph.node[number]
    constants = {tensor.name for tensor in model.graph.initializer}
    before = {name for earlier in model.graph.node[:number] for name in earlier.output if name}
    wanted = [name for name in dict.fromkeys(reads(node)) if name in before and name not in constants]
    cut, _ = prefix(model, number)
    values = dict(feeds)
    if wanted:
        del cut.graph.output[:]
        cut.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted)
        known = {value.name for value in cut.graph.input}
        given = {name: value for name, value in feeds.items() if name in known}
        values |= dict(zip(wanted, reference(cut, wanted, given), strict=True))
    fed = [name for name in dict.fromkeys(reads(node)) if name in values]
    single = _model_of(model, [node], [], [name for name in node.output if name])
    single.graph.input.extend(_typed(model, name, values[name]) for name in fed)
    inputs = {name: values[name] for name in fed}
    names = [value.name for value in single.graph.output]
    found = differences(names, own(single, names, inputs), reference(single, names, inputs), tolerances)
    return [difference for difference in found if not difference.is_small]


def _typed(model: onnx.ModelProto, name: str, value: Any) -> onnx.ValueInfoProto:
    """Return the declaration of input ``name``: the model's own, else one with type and shape of ``value``."""
    known: dict[str, onnx.ValueInfoProto] = {info.name: info for info in model.graph.input}
    if name in known:
        return known[name]
    made: onnx.ValueInfoProto = onnx.helper.make_tensor_value_info(
        name, onnx.helper.np_dtype_to_tensor_dtype(value.dtype), value.shape
    )
    return made


def _model_of(
    model: onnx.ModelProto, nodes: Sequence[onnx.NodeProto], inputs: Sequence[str], outputs: Sequence[str]
) -> onnx.ModelProto:
    """Return a model of some nodes of ``model``, with the initializers that these nodes read."""
    read = {name for node in nodes for name in reads(node)}
    graph = onnx.GraphProto(name=model.graph.name)
    graph.node.extend(nodes)
    graph.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name in read)
    graph.sparse_initializer.extend(tensor for tensor in model.graph.sparse_initializer if tensor.values.name in read)
    wanted = set(inputs)
    graph.input.extend(value for value in model.graph.input if value.name in wanted and value.name in read)
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
    made = onnx.ModelProto(ir_version=model.ir_version, graph=graph)
    made.opset_import.extend(model.opset_import)
    made.functions.extend(model.functions)
    return made
