"""Finds the parts of a model that are not tensor operators of ai.onnx, by its types and nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import onnx
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto

HOST_OPERATORS = {"ImageDecoder"}
"""Operators on tensors that decode files, which is work for the host."""
RANDOM = {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}


def out_of_scope(model: ModelProto, placed: Collection[str]) -> str:
    """Return the names of the model's parts that are not tensor operators of ai.onnx; "" if there are none.

    ``placed`` are the operator types that ran as nodes. For other operators the function bodies are searched, because
    ONNX Runtime ran the bodies instead.
    """
    with contextlib.suppress(onnx.shape_inference.InferenceError):  # types that stay unknown are not searched
        model = onnx.shape_inference.infer_shapes(model)
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    found: dict[str, None] = {}
    for graph in _graphs(model.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            found.update(dict.fromkeys(_type_kinds(value.type)))
        if any(tensor.data_type == TensorProto.STRING for tensor in graph.initializer):
            found["strings"] = None
        types = {value.name: value.type for value in (*graph.input, *graph.output, *graph.value_info)}
        for node in graph.node:
            found.update(dict.fromkeys(_node_kinds(node)))
            if node.op_type not in placed and (body := _function_body(node, opsets, types)):
                kinds = {kind for inner in body.node for kind in _node_kinds(inner)} - found.keys()
                found.update((f"{kind} in the function body of {node.op_type}", None) for kind in sorted(kinds))
    return ", ".join(sorted(found))


def is_random(model: ModelProto) -> bool:
    """Return whether the model's results depend on random numbers."""
    for graph in _graphs(model.graph):
        for node in graph.node:
            if node.op_type in RANDOM or (node.op_type == "Dropout" and len(node.input) > 2):
                return True
    return False


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """Yield the graph and all graphs in the attributes of its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from _graphs(attribute.g)


def _type_kinds(value_type: TypeProto) -> Iterator[str]:
    kind = value_type.WhichOneof("value")
    if kind == "optional_type":
        yield "optional"
        yield from _type_kinds(value_type.optional_type.elem_type)
    elif kind == "sequence_type":
        yield "sequences"
        yield from _type_kinds(value_type.sequence_type.elem_type)
    elif kind == "tensor_type":
        if value_type.tensor_type.elem_type == TensorProto.STRING:
            yield "strings"
    elif kind is not None:
        yield kind.removesuffix("_type") + "s"


def _node_kinds(node: NodeProto) -> Iterator[str]:
    if node.domain not in ("", "ai.onnx"):
        yield f"domain {node.domain}"
    if node.op_type in HOST_OPERATORS:
        yield node.op_type
    if "Sequence" in node.op_type and node.op_type != "ReverseSequence":
        yield "sequences"
    if node.op_type.startswith("Optional"):
        yield "optional"


def _function_body(node: NodeProto, opsets: dict[str, int], types: dict[str, TypeProto]) -> FunctionProto | None:
    """Return the function body of the node's operator in ONNX; None if it has none."""
    try:
        schema: Any = onnx.defs.get_schema(node.op_type, opsets.get(node.domain, 1), node.domain)
    except onnx.defs.SchemaError:
        return None
    body = FunctionProto()
    if schema.has_context_dependent_function:
        inputs = [types.get(name, TypeProto()).SerializeToString() for name in node.input]
        body.ParseFromString(schema.get_context_dependent_function(node.SerializeToString(), inputs))
        return body
    return schema.function_body if schema.has_function else None
