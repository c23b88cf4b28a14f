"""Encodes the IR of a cluster as JSON, from which plans can be compiled for shapes without a stored plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...model.ir import MAX_SUBGRAPH_DEPTH, AttrValue, Constant, DType, Graph, Node, Value
from .container import Json

MAX_DIM = 2**63 - 1


def encode_graph(graph: Graph, number: Callable[[Constant], int]) -> Json:
    """Encode the graph as a JSON value; ``number`` stores a constant and returns its number."""
    return _Encoder(number).graph(graph, outermost=True)


def decode_graph(data: Json, constants: Sequence[Constant]) -> Graph:
    """Decode a graph; the inverse of `encode_graph`.

    Raises:
        Exceptions of `errors.MALFORMED`: `encode_graph` did not make ``data``.
    """
    values = [_value(row, constants) for row in data["values"]]
    return _graph(data["graph"], values, constants, 0)


class _Encoder:
    def __init__(self, number: Callable[[Constant], int]) -> None:
        self.number = number
        self.values: dict[Value, int] = {}
        self.rows: list[Json] = []

    def graph(self, graph: Graph, outermost: bool = False) -> Json:
        encoded = {
            "name": graph.name,
            "opsets": dict(graph.opsets),
            "inputs": [self.value(value) for value in graph.inputs],
            "nodes": [self.node(node) for node in graph.nodes],
            "outputs": [self.value(value) for value in graph.outputs],
            "is_subgraph": graph.is_subgraph,
        }
        return {"graph": encoded, "values": self.rows} if outermost else encoded

    def value(self, value: Value | None) -> int | None:
        if value is None:
            return None
        if value not in self.values:
            self.values[value] = len(self.rows)
            self.rows.append(
                {
                    "name": value.name,
                    "dtype": None if value.dtype is None else value.dtype.onnx,
                    "shape": None if value.shape is None else list(value.shape),
                    "constant": None if value.initializer is None else self.number(value.initializer),
                    "is_container": value.is_container,
                }
            )
        return self.values[value]

    def node(self, node: Node) -> Json:
        return {
            "name": node.name,
            "op_type": node.op_type,
            "domain": node.domain,
            "since_version": node.since_version,
            "inputs": [self.value(value) for value in node.inputs],
            "outputs": [self.value(value) for value in node.outputs],
            "implicit_inputs": [self.value(value) for value in node.implicit_inputs],
            "attributes": {name: self.attribute(value) for name, value in node.attributes.items()},
            "unreadable_attributes": list(node.unreadable_attributes),
            "has_subgraphs": node.has_subgraphs,
            "subgraphs": {name: self.graph(body) for name, body in node.subgraphs.items()},
        }

    def attribute(self, value: AttrValue) -> Json:
        """Return kind and value of an attribute.

        Floats become hexadecimal text, because numbers in JSON may be rounded and cannot be infinite.
        """
        if isinstance(value, Constant):
            return ["constant", self.number(value)]
        if isinstance(value, tuple):
            kind = "floats" if value and isinstance(value[0], float) else "values"
            return [kind, [x.hex() if isinstance(x, float) else x for x in value]]
        return ["float", value.hex()] if isinstance(value, float) else ["value", value]


def _typed(kind: type[Any], value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {value!r}")
    return value


def _at(items: Sequence[Any], index: Any) -> Any:
    if not 0 <= _typed(int, index) < len(items):
        raise IndexError(f"an index: got {index}, expected at least 0 and less than {len(items)}")
    return items[index]


def dtype_of(number: Json) -> DType:
    """Return the element type with this number. Raises ValueError, TypeError."""
    return DType(_typed(int, number))


def dims_of(row: Json) -> tuple[int, ...]:
    """Return a shape of known dimensions. Raises ValueError, TypeError."""
    dims = tuple(_typed(int, dim) for dim in row)
    if any(not 0 <= dim <= MAX_DIM for dim in dims):
        raise ValueError(f"a shape: got {dims}, expected dimensions from 0 to {MAX_DIM}")
    return dims


def _value(row: Json, constants: Sequence[Constant]) -> Value:
    shape = None
    if row["shape"] is not None:
        for dim in row["shape"]:
            if not (dim is None or type(dim) is str or (type(dim) is int and 0 <= dim <= MAX_DIM)):
                raise ValueError(f"a dimension: got {dim!r}, expected a name, null, or an integer from 0 to {MAX_DIM}")
        shape = tuple(row["shape"])
    dtype = None if row["dtype"] is None else dtype_of(row["dtype"])
    constant = None if row["constant"] is None else _at(constants, row["constant"])
    return Value(_typed(str, row["name"]), dtype, shape, constant, _typed(bool, row["is_container"]))


def _graph(data: Json, values: Sequence[Value], constants: Sequence[Constant], depth: int) -> Graph:
    if depth > MAX_SUBGRAPH_DEPTH:
        raise ValueError(f"bodies of nodes nest deeper than {MAX_SUBGRAPH_DEPTH} levels")
    return Graph(
        name=_typed(str, data["name"]),
        nodes=[_node(row, values, constants, index, depth) for index, row in enumerate(data["nodes"])],
        inputs=[_at(values, index) for index in data["inputs"]],
        outputs=[_at(values, index) for index in data["outputs"]],
        opsets={_typed(str, domain): _typed(int, version) for domain, version in data["opsets"].items()},
        is_subgraph=_typed(bool, data["is_subgraph"]),
    )


def _node(row: Json, values: Sequence[Value], constants: Sequence[Constant], index: int, depth: int) -> Node:
    def values_of(kind: str) -> tuple[Value | None, ...]:
        return tuple(None if number is None else _at(values, number) for number in row[kind])

    return Node(
        name=_typed(str, row["name"]),
        op_type=_typed(str, row["op_type"]),
        domain=_typed(str, row["domain"]),
        since_version=_typed(int, row["since_version"]),
        inputs=values_of("inputs"),
        outputs=values_of("outputs"),
        attributes={name: _attribute(value, constants) for name, value in row["attributes"].items()},
        index=index,
        implicit_inputs=tuple(_at(values, number) for number in row["implicit_inputs"]),
        has_subgraphs=_typed(bool, row["has_subgraphs"]),
        subgraphs={name: _graph(body, values, constants, depth + 1) for name, body in row["subgraphs"].items()},
        unreadable_attributes=tuple(_typed(str, name) for name in row["unreadable_attributes"]),
    )


def _attribute(row: Json, constants: Sequence[Constant]) -> AttrValue:
    kind, value = row
    if kind == "constant":
        constant: Constant = _at(constants, value)
        return constant
    if kind == "float":
        return float.fromhex(value)
    if kind == "floats":
        return tuple(float.fromhex(x) for x in value)
    if kind == "value" and type(value) in (int, str):
        return value  # type: ignore[no-any-return]
    if kind == "values" and len({type(x) for x in value} | {int}) <= 2 and all(type(x) in (int, str) for x in value):
        return tuple(value)
    raise ValueError(f"an attribute: got the kind {kind!r} with the value {value!r}, expected a matching pair")
