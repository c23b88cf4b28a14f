"""Reader of ``OrtGraph`` into the IR through ORT's C API.

Each initializer becomes a `Constant` that reads its contents on first use. Names and strings are copied. Types and
dimensions that ORT does not know stay unknown; a failed call raises `OrtCallError`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ...abi.core import ffi
from ..ir import MAX_SUBGRAPH_DEPTH, Array, AttrValue, Constant, DType, Graph, InvalidModel, Node, Value
from ..open_file import OpenFile, native_path, open_file
from .ort_attributes import read_attribute
from .ort_calls import OrtCallError, OrtCalls, elements, stored_bytes, text


def read_graph(api: Any, ort_graph: Any) -> Graph:
    """Return the IR of ``ort_graph`` (``const OrtGraph *``); ``api`` is ``const OrtApi *``.

    Borrowed constants of the result are valid only as long as ``ort_graph``: see `Constant.keep`.

    Raises:
        OrtCallError: a call of ORT's API failed.
    """
    return _GraphReader(OrtCalls(api), ort_graph).read()


class _GraphReader:
    """Reads an ``OrtGraph``.

    For a body that is reached from its node, ``outer`` is the reader of the graph around it.
    """

    def __init__(self, ort: OrtCalls, graph: Any, outer: _GraphReader | None = None) -> None:
        self.ort = ort
        self.graph = graph
        self.outer = outer
        self.depth: int = 0 if outer is None else outer.depth + 1
        self.values: dict[str, Value] = {}
        self.files: dict[Path, OpenFile] = {} if outer is None else outer.files
        path = native_path(text(ort.out("Graph_GetModelPath", "const char *", graph)))
        self.folder = Path(path).parent if path else None

    # ---- graph ----

    def read(self) -> Graph:
        graph = self.graph
        inputs = [
            self._value(info)
            for info in self.ort.list("Graph_GetNumInputs", "Graph_GetInputs", "const OrtValueInfo *", graph)
        ]
        nodes = [
            self._node(node, index)
            for index, node in enumerate(self.ort.list("Graph_GetNumNodes", "Graph_GetNodes", "const OrtNode *", graph))
        ]
        outputs = [
            self._value(info)
            for info in self.ort.list("Graph_GetNumOutputs", "Graph_GetOutputs", "const OrtValueInfo *", graph)
        ]
        parent = self.ort.out("Graph_GetParentNode", "const OrtNode *", graph)
        return Graph(
            name=text(self.ort.out("Graph_GetName", "const char *", graph)),
            nodes=nodes,
            inputs=[value for value in inputs if value is not None],
            outputs=[value for value in outputs if value is not None],
            opsets=self._opsets(),
            is_subgraph=parent != ffi.NULL,
            parent=_GraphReader(self.ort, graph)._node(parent, 0) if parent != ffi.NULL and self.depth == 0 else None,
        )

    def _opsets(self) -> dict[str, int]:
        count = self.ort.out("Graph_GetNumOperatorSets", "size_t", self.graph)
        domains, versions = ffi.new("const char *[]", count), ffi.new("int64_t[]", count)
        self.ort.call("Graph_GetOperatorSets", self.graph, domains, versions, count)
        names = [text(domain) for domain in domains]
        return {"" if n == "ai.onnx" else n: int(v) for n, v in zip(names, versions, strict=True)}

    # ---- values ----

    def _value(self, info: Any) -> Value | None:
        """Return the value that ``info`` describes; None for an omitted value."""
        if info == ffi.NULL:
            return None
        name = text(self.ort.out("GetValueInfoName", "const char *", info))
        if not name:
            return None
        value = self.values.get(name)
        if value is None and self.ort.out("ValueInfo_IsFromOuterScope", "bool", info):
            value = self._outer_value(name)
        if value is None:
            kind = self.ort.out("GetValueInfoTypeInfo", "const OrtTypeInfo *", info)
            value = self.values[name] = Value(name, *self.ort.tensor_type(kind))
            value.is_container = value.dtype is None and self.ort.is_container(kind)
            if self.ort.out("ValueInfo_IsConstantInitializer", "bool", info):
                value.initializer = self._initializer(info, value)
        return value

    def _outer_value(self, name: str) -> Value | None:
        """Return the value of a surrounding graph; None if those graphs lack it."""
        reader = self.outer
        while reader is not None and name not in reader.values:
            reader = reader.outer
        return None if reader is None else reader.values[name]

    def _initializer(self, info: Any, value: Value) -> Constant | None:
        dtype, shape = value.dtype, value.shape
        if dtype is None or not dtype.is_supported or shape is None:
            return None
        dims = tuple(dim for dim in shape if isinstance(dim, int))
        if len(dims) != len(shape):
            return None
        external = self._external(info, value.name, dtype, dims)
        if external is not None:
            return external

        ort, name = self.ort, value.name  # locals: the closure must not keep the reader and all values alive

        def load() -> Array:
            try:
                return ort.tensor_data(ort.out("ValueInfo_GetInitializerValue", "const OrtValue *", info), dtype, dims)
            except OrtCallError as error:
                raise InvalidModel(f"the contents of {name!r} cannot be read: {error}") from error

        return Constant(dtype, dims, load, borrowed=True, name=name)

    def _external(self, info: Any, name: str, dtype: DType, dims: tuple[int, ...]) -> Constant | None:
        """Return a constant that reads its external file; None if the data are inline or the file is invalid.

        ORT reads the contents of an invalid file itself and reports the error.
        """
        external = self.ort.out("ValueInfo_GetExternalInitializerInfo", "OrtExternalInitializerInfo *", info)
        if external == ffi.NULL:
            return None
        try:
            path = Path(native_path(text(self.ort.api.ExternalInitializerInfo_GetFilePath(external))))
            offset = int(self.ort.api.ExternalInitializerInfo_GetFileOffset(external))
            size = int(self.ort.api.ExternalInitializerInfo_GetByteSize(external))
        finally:
            self.ort.api.ReleaseExternalInitializerInfo(external)
        if not path.is_absolute() and self.folder is not None:
            path = self.folder / path
        if size != stored_bytes(dtype, dims) or size == 0:
            return None
        try:
            file = self._file(path)
        except OSError:
            return None
        if offset < 0 or len(file) < offset + size:
            return None

        def load() -> Array:
            try:
                data = file.read(offset, size)
                file.check_unchanged()
            except OSError as error:
                raise InvalidModel(f"the contents of {name!r} cannot be read: {error}") from error
            return elements(np.frombuffer(data, np.uint8), dtype, dims)

        return Constant(dtype, dims, load, is_file=True, name=name)

    def _file(self, path: Path) -> OpenFile:
        if path not in self.files:
            self.files[path] = open_file(path)
        return self.files[path]

    # ---- nodes ----

    def _node(self, node: Any, index: int) -> Node:
        def values(kind: str) -> list[Value | None]:
            infos = self.ort.list(f"Node_GetNum{kind}", f"Node_Get{kind}", "const OrtValueInfo *", node)
            return [self._value(info) for info in infos]

        domain = text(self.ort.out("Node_GetDomain", "const char *", node))
        inputs, outputs, implicit = values("Inputs"), values("Outputs"), values("ImplicitInputs")
        num_subgraphs = self.ort.out("Node_GetNumSubgraphs", "size_t", node)
        subgraphs = self._subgraphs(node, num_subgraphs)  # bodies share the implicit inputs, which are read above
        attributes: dict[str, AttrValue] = {}
        unreadable: list[str] = []
        for attribute in self.ort.list("Node_GetNumAttributes", "Node_GetAttributes", "const OrtOpAttr *", node):
            if attribute == ffi.NULL:
                continue
            name = text(self.ort.out("OpAttr_GetName", "const char *", attribute))
            if name in subgraphs:
                continue
            value = read_attribute(self.ort, attribute)
            if value is None:
                unreadable.append(name)
            else:
                attributes[name] = value
        return Node(
            name=text(self.ort.out("Node_GetName", "const char *", node)),
            op_type=text(self.ort.out("Node_GetOperatorType", "const char *", node)),
            domain="" if domain == "ai.onnx" else domain,
            since_version=int(self.ort.out("Node_GetSinceVersion", "int", node)),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            attributes=attributes,
            index=index,
            implicit_inputs=tuple(value for value in implicit if value is not None),
            has_subgraphs=num_subgraphs > 0,
            subgraphs=subgraphs,
            unreadable_attributes=tuple(unreadable),
            provider=text(self.ort.out("Node_GetEpName", "const char *", node)),
        )

    def _subgraphs(self, node: Any, count: int) -> dict[str, Graph]:
        if count == 0 or self.depth >= MAX_SUBGRAPH_DEPTH:
            return {}
        graphs, names = ffi.new("const OrtGraph *[]", count), ffi.new("const char *[]", count)
        self.ort.call("Node_GetSubgraphs", node, graphs, count, names)
        return {
            text(name): _GraphReader(self.ort, graph, self).read() for name, graph in zip(names, graphs, strict=True)
        }
