"""Reader of ONNX models into the IR without ONNX Runtime, for reports and tests. Sessions use `ort_graph` instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import onnx
from onnx import helper, numpy_helper

from .ir import MAX_SUBGRAPH_DEPTH, Array, Constant, DType, Graph, Node, Value

MICROSOFT = "com.microsoft"


def storage(array: Array) -> tuple[Array, DType]:
    """Return the array as `Constant` stores it (bfloat16 as uint16, smaller floats as uint8) and its element type."""
    if array.dtype.isbuiltin == 2:  # a type of ml_dtypes
        dtype = DType(helper.np_dtype_to_tensor_dtype(array.dtype))
        return (array.astype(dtype.numpy) if dtype.is_integer else array.view(dtype.numpy)), dtype
    return array, DType.STRING if array.dtype.kind == "O" else DType.from_numpy(array.dtype)


def _attribute(proto: onnx.AttributeProto) -> Any:
    value = helper.get_attribute_value(proto)
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, onnx.TensorProto):
        return Constant.of(*storage(numpy_helper.to_array(value)))
    if isinstance(value, (int, float, str)):
        return value
    return tuple(v.decode() if isinstance(v, bytes) else v for v in value)


def _value(info: onnx.ValueInfoProto, dynamic: bool) -> Value:
    tensor = info.type.tensor_type
    shape: list[int | str | None] = []
    for dim in tensor.shape.dim:
        known = dim.dim_value if dim.HasField("dim_value") and not dynamic else None
        shape.append(known if known is not None else dim.dim_param or None)
    dtype = DType(tensor.elem_type) if tensor.elem_type else None
    container = info.type.WhichOneof("value") not in (None, "tensor_type")
    return Value(info.name, dtype, tuple(shape) if tensor.HasField("shape") else None, is_container=container)


def read_model(model: onnx.ModelProto, dynamic: bool = False) -> Graph:
    """Return the IR of a model; ``dynamic`` makes the static dimensions of its inputs unknown."""
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    inferred = onnx.shape_inference.infer_shapes(model).graph
    return _Reader(opsets, inferred, dynamic, {}, 0).read("harness")


class _Reader:
    """Reads a GraphProto with inferred types; ``outer`` has the values of the surrounding graphs by name."""

    def __init__(
        self, opsets: Mapping[str, int], graph: onnx.GraphProto, dynamic: bool, outer: dict[str, Value], depth: int
    ) -> None:
        self.opsets = opsets
        self.graph = graph
        self.outer = outer
        self.depth = depth
        self.values = {info.name: _value(info, dynamic) for info in graph.input}
        for proto in graph.initializer:
            array, dtype = storage(numpy_helper.to_array(proto))
            self.values[proto.name] = Value(proto.name, dtype, array.shape, initializer=Constant.of(array, dtype))
        self.results = {info.name: _value(info, dynamic=True) for info in (*graph.value_info, *graph.output)}
        self.own = {name for proto in graph.node for name in proto.output}
        for info in graph.output if depth == 0 else ():
            # ONNX infers no result type for some function operators. Give such a model output the first input's type.
            if self.results[info.name].dtype is None and info.type.WhichOneof("value") in (None, "tensor_type"):
                self.results[info.name] = Value(info.name, next(iter(self.values.values())).dtype, None)

    def read(self, name: str) -> Graph:
        graph = self.graph
        nodes = [self._node(index, proto) for index, proto in enumerate(graph.node)]
        initializers = {proto.name for proto in graph.initializer}
        inputs = [self.values[info.name] for info in graph.input if info.name not in initializers]
        outputs = [value for info in graph.output if (value := self._named(info.name)) is not None]
        return Graph(name, nodes, inputs, outputs, self.opsets, is_subgraph=self.depth > 0)

    def _named(self, name: str) -> Value | None:
        if not name:
            return None
        if name not in self.values:
            if name not in self.own and name in self.outer:
                return self.outer[name]
            self.values[name] = self.results.get(name) or Value(name, None, None)
        return self.values[name]

    def _node(self, index: int, proto: onnx.NodeProto) -> Node:
        domain = "" if proto.domain == "ai.onnx" else proto.domain
        version = 1
        if domain == "" or domain.startswith("ai.onnx."):  # onnx has no schemas of other domains
            version = onnx.defs.get_schema(proto.op_type, self.opsets[domain], domain).since_version
        inputs = tuple(self._named(name) for name in proto.input)
        bodies = {a.name: a.g for a in proto.attribute if a.type == onnx.AttributeProto.GRAPH}
        visible = {**self.outer, **self.values}
        subgraphs = {}
        for name, body in bodies.items() if self.depth < MAX_SUBGRAPH_DEPTH else ():
            subgraphs[name] = _Reader(self.opsets, body, False, visible, self.depth + 1).read(body.name)
        implicit = {value: None for body in subgraphs.values() for value in _outer_reads(body, visible)}
        return Node(
            name=proto.name or proto.output[0],
            op_type=proto.op_type,
            domain=domain,
            since_version=version,
            inputs=inputs,
            outputs=tuple(self._named(name) for name in proto.output),
            attributes={a.name: _attribute(a) for a in proto.attribute if a.name not in bodies},
            index=index,
            implicit_inputs=tuple(implicit),
            has_subgraphs=bool(bodies),
            subgraphs=subgraphs,
        )


def _outer_reads(body: Graph, visible: Mapping[str, Value]) -> Iterator[Value]:
    for value in (*(value for node in body.all_nodes() for value in node.inputs), *body.outputs):
        if value is not None and visible.get(value.name) is value:
            yield value
