"""Reads an ``OrtGraph`` into the IR through ORT's C API.

Initializers are not read here: each becomes a `Constant` that knows where its contents are. Names and strings are
copied. Whatever ORT cannot tell about a value stays unknown; a call that fails raises `OrtCallError`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from ..abi.core import ffi, lib
from .ir import Array, AttrValue, Constant, DType, Graph, Node, Value


class OrtCallError(RuntimeError):
    """A function of ORT's API failed; the message names it."""


def read_graph(api: Any, ort_graph: Any) -> Graph:
    """The IR of ``ort_graph`` (``const OrtGraph *``); ``api`` is ``const OrtApi *``.

    Borrowed constants of the result die with the graph: see `Constant.keep`.

    Raises:
        OrtCallError: a call failed.
    """
    return _GraphReader(api, ort_graph).read()


class _GraphReader:
    def __init__(self, api: Any, graph: Any) -> None:
        self.api = api
        self.graph = graph
        self.values: dict[str, Value] = {}
        path = self._string(self._out("Graph_GetModelPath", "const char *", graph))
        self.folder = Path(path).parent if path else None

    # ---- calls ----

    def _call(self, name: str, *args: Any) -> None:
        status = getattr(self.api, name)(*args)
        if status != ffi.NULL:
            message = self._string(self.api.GetErrorMessage(status))
            self.api.ReleaseStatus(status)
            raise OrtCallError(f"{name}: {message}")

    def _out(self, name: str, kind: str, *args: Any) -> Any:
        """Calls a function whose last parameter is an out pointer to ``kind``; gives what it wrote."""
        out = ffi.new(f"{kind}*" if kind.endswith("*") else f"{kind} *")
        self._call(name, *args, out)
        return out[0]

    def _list(self, count_name: str, name: str, kind: str, owner: Any) -> list[Any]:
        count = self._out(count_name, "size_t", owner)
        items = ffi.new(f"{kind}[]", count)
        self._call(name, owner, items, count)
        return list(items)

    @staticmethod
    def _string(text: Any) -> str:
        return "" if text == ffi.NULL else ffi.string(text).decode(errors="replace")

    # ---- graph ----

    def read(self) -> Graph:
        graph = self.graph
        inputs = [
            self._value(info)
            for info in self._list("Graph_GetNumInputs", "Graph_GetInputs", "const OrtValueInfo *", graph)
        ]
        nodes = [
            self._node(node, index)
            for index, node in enumerate(self._list("Graph_GetNumNodes", "Graph_GetNodes", "const OrtNode *", graph))
        ]
        outputs = [
            self._value(info)
            for info in self._list("Graph_GetNumOutputs", "Graph_GetOutputs", "const OrtValueInfo *", graph)
        ]
        return Graph(
            name=self._string(self._out("Graph_GetName", "const char *", graph)),
            nodes=nodes,
            inputs=[value for value in inputs if value is not None],
            outputs=[value for value in outputs if value is not None],
            opsets=self._opsets(),
            is_subgraph=self._out("Graph_GetParentNode", "const OrtNode *", graph) != ffi.NULL,
        )

    def _opsets(self) -> dict[str, int]:
        count = self._out("Graph_GetNumOperatorSets", "size_t", self.graph)
        domains, versions = ffi.new("const char *[]", count), ffi.new("int64_t[]", count)
        self._call("Graph_GetOperatorSets", self.graph, domains, versions, count)
        names = [self._string(domain) for domain in domains]
        return {"" if n == "ai.onnx" else n: int(v) for n, v in zip(names, versions, strict=True)}

    # ---- values ----

    def _value(self, info: Any) -> Value | None:
        """The value that ``info`` describes; None for an omitted one."""
        if info == ffi.NULL:
            return None
        name = self._string(self._out("GetValueInfoName", "const char *", info))
        if not name:
            return None
        value = self.values.get(name)
        if value is None:
            dtype, shape = self._tensor_type(self._out("GetValueInfoTypeInfo", "const OrtTypeInfo *", info))
            value = self.values[name] = Value(name, dtype, shape)
            if self._out("ValueInfo_IsConstantInitializer", "bool", info):
                value.initializer = self._initializer(info, value)
        return value

    def _tensor_type(self, info: Any) -> tuple[DType | None, tuple[int | str | None, ...] | None]:
        if info == ffi.NULL or self._out("GetOnnxTypeFromTypeInfo", "ONNXType", info) != lib.ONNX_TYPE_TENSOR:
            return None, None
        tensor = self._out("CastTypeInfoToTensorInfo", "const OrtTensorTypeAndShapeInfo *", info)
        if tensor == ffi.NULL:
            return None, None
        dtype = self._dtype(self._out("GetTensorElementType", "ONNXTensorElementDataType", tensor))
        if not self.api.TensorTypeAndShape_HasShape(tensor):
            return dtype, None
        rank = self._out("GetDimensionsCount", "size_t", tensor)
        dims, names = ffi.new("int64_t[]", rank), ffi.new("const char *[]", rank)
        self._call("GetDimensions", tensor, dims, rank)
        self._call("GetSymbolicDimensions", tensor, names, rank)
        return dtype, tuple(
            int(dim) if dim >= 0 else self._string(name) or None for dim, name in zip(dims, names, strict=True)
        )

    @staticmethod
    def _dtype(number: int) -> DType | None:
        try:
            return DType(int(number))
        except ValueError:  # undefined, or newer than this list
            return None

    def _initializer(self, info: Any, value: Value) -> Constant | None:
        dtype, shape = value.dtype, value.shape
        if dtype is None or not dtype.is_supported or shape is None:
            return None
        dims = tuple(dim for dim in shape if isinstance(dim, int))
        if len(dims) != len(shape):
            return None
        mapped = self._external(info, dtype, dims)
        if mapped is not None:
            return mapped

        def load() -> Array:
            tensor = self._out("ValueInfo_GetInitializerValue", "const OrtValue *", info)
            return self._tensor_data(tensor, dtype, dims)

        return Constant(dtype, dims, load, borrowed=True)

    def _external(self, info: Any, dtype: DType, dims: tuple[int, ...]) -> Constant | None:
        """A constant that maps its external file; None where the data are inline or the file is not as it should be.

        Then ORT is asked for the contents, and says what is wrong with them.
        """
        external = self._out("ValueInfo_GetExternalInitializerInfo", "OrtExternalInitializerInfo *", info)
        if external == ffi.NULL:
            return None
        try:
            path = Path(self._string(self.api.ExternalInitializerInfo_GetFilePath(external)))
            offset = int(self.api.ExternalInitializerInfo_GetFileOffset(external))
            size = int(self.api.ExternalInitializerInfo_GetByteSize(external))
        finally:
            self.api.ReleaseExternalInitializerInfo(external)
        if not path.is_absolute() and self.folder is not None:
            path = self.folder / path
        if size != math.prod(dims) * dtype.itemsize or size == 0:
            return None
        try:
            if offset < 0 or path.stat().st_size < offset + size:
                return None
        except OSError:
            return None
        return Constant(dtype, dims, lambda: np.memmap(path, dtype.numpy, "r", offset, dims))

    def _tensor_data(self, tensor: Any, dtype: DType, dims: tuple[int, ...]) -> Array:
        """The elements of an OrtValue in host memory, zero copy."""
        size = math.prod(dims) * dtype.itemsize
        if size == 0:
            return np.empty(dims, dtype.numpy)
        info = self._out("GetTensorTypeAndShape", "OrtTensorTypeAndShapeInfo *", tensor)
        try:
            actual = self._dtype(self._out("GetTensorElementType", "ONNXTensorElementDataType", info))
            elements = self._out("GetTensorShapeElementCount", "size_t", info)
        finally:
            self.api.ReleaseTensorTypeAndShapeInfo(info)
        if actual is not dtype or elements != math.prod(dims):
            raise OrtCallError(f"a tensor of {elements} {actual} elements is declared as {dtype}{list(dims)}")
        data = self._out("GetTensorData", "const void *", tensor)
        return np.frombuffer(ffi.buffer(data, size), dtype.numpy).reshape(dims)

    # ---- nodes ----

    def _node(self, node: Any, index: int) -> Node:
        def values(kind: str) -> list[Value | None]:
            infos = self._list(f"Node_GetNum{kind}", f"Node_Get{kind}", "const OrtValueInfo *", node)
            return [self._value(info) for info in infos]

        domain = self._string(self._out("Node_GetDomain", "const char *", node))
        attributes: dict[str, AttrValue] = {}
        unreadable: list[str] = []
        for attribute in self._list("Node_GetNumAttributes", "Node_GetAttributes", "const OrtOpAttr *", node):
            if attribute == ffi.NULL:
                continue
            name = self._string(self._out("OpAttr_GetName", "const char *", attribute))
            value = self._attribute(attribute)
            if value is None:
                unreadable.append(name)
            else:
                attributes[name] = value
        return Node(
            name=self._string(self._out("Node_GetName", "const char *", node)),
            op_type=self._string(self._out("Node_GetOperatorType", "const char *", node)),
            domain="" if domain == "ai.onnx" else domain,
            since_version=int(self._out("Node_GetSinceVersion", "int", node)),
            inputs=tuple(values("Inputs")),
            outputs=tuple(values("Outputs")),
            attributes=attributes,
            index=index,
            implicit_inputs=tuple(value for value in values("ImplicitInputs") if value is not None),
            has_subgraphs=self._out("Node_GetNumSubgraphs", "size_t", node) > 0,
            unreadable_attributes=tuple(unreadable),
            provider=self._string(self._out("Node_GetEpName", "const char *", node)),
        )

    def _attribute(self, attribute: Any) -> AttrValue | None:
        kind = self._out("OpAttr_GetType", "OrtOpAttrType", attribute)
        if kind == lib.ORT_OP_ATTR_INT:
            return int(self._attribute_data(attribute, kind, "int64_t")[0])
        if kind == lib.ORT_OP_ATTR_INTS:
            return tuple(int(x) for x in self._attribute_data(attribute, kind, "int64_t"))
        if kind == lib.ORT_OP_ATTR_FLOAT:
            return float(self._attribute_data(attribute, kind, "float")[0])
        if kind == lib.ORT_OP_ATTR_FLOATS:
            return tuple(float(x) for x in self._attribute_data(attribute, kind, "float"))
        if kind == lib.ORT_OP_ATTR_STRING:
            return bytes(ffi.buffer(self._attribute_data(attribute, kind, "char"))).decode(errors="replace")
        if kind == lib.ORT_OP_ATTR_STRINGS:
            joined = bytes(ffi.buffer(self._attribute_data(attribute, kind, "char")))
            return tuple(part.decode(errors="replace") for part in joined.split(b"\0")[:-1])
        if kind == lib.ORT_OP_ATTR_TENSOR:
            return self._tensor_attribute(attribute)
        return None

    def _attribute_data(self, attribute: Any, kind: int, element: str) -> Any:
        size = ffi.new("size_t *")
        # With no room the call fails and says how much it needs; that status is no error.
        status = self.api.ReadOpAttr(attribute, kind, ffi.NULL, 0, size)
        if status != ffi.NULL:
            self.api.ReleaseStatus(status)
        data = ffi.new(f"{element}[]", size[0] // ffi.sizeof(element))
        if size[0]:
            self._call("ReadOpAttr", attribute, kind, data, size[0], size)
        return data

    def _tensor_attribute(self, attribute: Any) -> Array | None:
        tensor = self._out("OpAttr_GetTensorAttributeAsOrtValue", "OrtValue *", attribute)
        try:
            info = self._out("GetTensorTypeAndShape", "OrtTensorTypeAndShapeInfo *", tensor)
            try:
                dtype = self._dtype(self._out("GetTensorElementType", "ONNXTensorElementDataType", info))
                rank = self._out("GetDimensionsCount", "size_t", info)
                dims = ffi.new("int64_t[]", rank)
                self._call("GetDimensions", info, dims, rank)
            finally:
                self.api.ReleaseTensorTypeAndShapeInfo(info)
            if dtype is None or not dtype.is_supported:
                return None
            return self._tensor_data(tensor, dtype, tuple(int(dim) for dim in dims)).copy()
        finally:
            self.api.ReleaseValue(tensor)
