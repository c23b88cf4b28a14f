"""The IR of an ONNX model without ONNX Runtime: for reports and tests. Sessions read ORT's own graph (`ort_graph`)."""

from __future__ import annotations

from typing import Any

import onnx
from onnx import helper, numpy_helper

from .ir import Array, Constant, DType, Graph, Node, Value

MICROSOFT = "com.microsoft"


def storage(array: Array) -> tuple[Array, DType]:
    """The array as `Constant` holds it (bfloat16 as uint16, smaller floats as uint8), and its element type."""
    if array.dtype.isbuiltin == 2:  # of ml_dtypes
        dtype = DType(helper.np_dtype_to_tensor_dtype(array.dtype))
        return (array.astype(dtype.numpy) if dtype.is_integer else array.view(dtype.numpy)), dtype
    return array, DType.from_numpy(array.dtype)


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
    return Value(info.name, dtype, tuple(shape) if tensor.HasField("shape") else None)


def read_model(model: onnx.ModelProto, dynamic: bool = False) -> Graph:
    """The IR of a model; ``dynamic`` forgets the sizes of its inputs."""
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    values = {info.name: _value(info, dynamic) for info in model.graph.input}
    for proto in model.graph.initializer:
        array, dtype = storage(numpy_helper.to_array(proto))
        values[proto.name] = Value(proto.name, dtype, array.shape, initializer=Constant.of(array, dtype))
    inferred = onnx.shape_inference.infer_shapes(model).graph
    outputs = {info.name: _value(info, dynamic=True) for info in (*inferred.value_info, *inferred.output)}
    for info in model.graph.output:
        # ONNX infers no type for some of its functions; theirs is that of their first input.
        if outputs[info.name].dtype is None:
            outputs[info.name] = Value(info.name, next(iter(values.values())).dtype, None)

    def value(name: str) -> Value | None:
        if not name:
            return None
        if name not in values:
            values[name] = outputs.get(name) or Value(name, None, None)
        return values[name]

    nodes = []
    for index, proto in enumerate(model.graph.node):
        domain = "" if proto.domain == "ai.onnx" else proto.domain
        version = 1
        if domain != MICROSOFT:
            version = onnx.defs.get_schema(proto.op_type, opsets[domain], domain).since_version
        nodes.append(
            Node(
                name=proto.name or proto.output[0],
                op_type=proto.op_type,
                domain=domain,
                since_version=version,
                inputs=tuple(value(name) for name in proto.input),
                outputs=tuple(value(name) for name in proto.output),
                attributes={a.name: _attribute(a) for a in proto.attribute},
                index=index,
            )
        )
    initializers = {proto.name for proto in model.graph.initializer}
    inputs = [values[info.name] for info in model.graph.input if info.name not in initializers]
    return Graph("harness", nodes, inputs, [values[info.name] for info in model.graph.output], opsets)
