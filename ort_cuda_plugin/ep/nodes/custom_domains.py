"""Declares custom operators to ONNX Runtime: an OrtCustomOpDomain per domain, with the OrtCustomOps of its schemas.

ONNX Runtime asks for the domains when an application adds the plugin to a session's options, so a session knows the
operators that were registered before that. An operator has one schema for all of its versions; the opset that the model
imports selects the version of a node. Each combination of element types in a schema has a separate OrtCustomOp, so that
ONNX Runtime can infer the types of results.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ...abi import host
from ...abi.core import check, core, ffi, new_error
from ...clusters.claims.claims import NodeVerdict
from ...clusters.nodes.shape_inference import NamedShape, infer_results, unknown_dim
from ...custom import registry
from ...custom.operator import CustomOperator, Port, PortKind
from ...model.ir import AttrValue, DType, InvalidModel, Unsupported, Value
from ...model.ort.ort_attributes import read_attribute
from ...model.ort.ort_calls import OrtCallError, OrtCalls, element_type, text
from ...plugin_library import EP_NAME
from .handles import HandleTable

MAX_COMBINATIONS: Final = 128
"""Maximum combinations of element types in a schema; one with more takes any types, and the claim checks the types."""

_ANY: Final = 0  # ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED


@dataclass(frozen=True)
class SchemaPort:
    """An input or output of a schema; ``dtype`` is None for any type."""

    dtype: DType | None
    kind: PortKind
    minimum: int = 1
    is_homogeneous: bool = True


@dataclass(frozen=True)
class Schema:
    """The operators of one name in one domain, and the combinations of types that they take."""

    operators: tuple[CustomOperator, ...]
    combinations: tuple[tuple[tuple[SchemaPort, ...], tuple[SchemaPort, ...]], ...]

    @property
    def since(self) -> int:
        return min(operator.version for operator in self.operators)


def schema_of(operators: Sequence[CustomOperator], types: frozenset[DType]) -> Schema:
    """Return the schema of operators of one name. ``types`` are the element types that this ONNX Runtime has."""
    inputs = _common([operator.inputs for operator in operators])
    outputs = _common([operator.outputs for operator in operators])
    found = dict.fromkeys(itertools.chain.from_iterable(_typed(each, inputs, outputs, types) for each in operators))
    if len(found) > MAX_COMBINATIONS:
        found = {(None,) * (len(inputs) + len(outputs)): None}
    combinations = []
    for dtypes in found:
        ports = [
            SchemaPort(dtype, port.kind, port.minimum, port.is_homogeneous)
            for dtype, port in zip(dtypes, [*inputs, *outputs], strict=True)
        ]
        combinations.append((tuple(ports[: len(inputs)]), tuple(ports[len(inputs) :])))
    return Schema(tuple(operators), tuple(combinations))


def _common(rows: Sequence[Sequence[Port]]) -> list[SchemaPort]:
    """Merge the ports of an operator's versions. A port is optional in the result if it is optional or missing in some
    version.
    """
    ports: list[SchemaPort] = []
    for index in range(max(map(len, rows))):
        there = [row[index] for row in rows if index < len(row)]
        if any(port.kind is PortKind.VARIADIC for port in there):
            after = [sum(port.kind is PortKind.REQUIRED for port in row[index:]) for row in rows]
            least = [row[-1].minimum if row and row[-1].kind is PortKind.VARIADIC else 0 for row in rows]
            is_homogeneous = len(rows) == 1 and bool(there[0].constraint)
            ports.append(
                SchemaPort(None, PortKind.VARIADIC, min(map(sum, zip(after, least, strict=True))), is_homogeneous)
            )
            break
        is_required = len(there) == len(rows) and all(port.kind is PortKind.REQUIRED for port in there)
        ports.append(SchemaPort(None, PortKind.REQUIRED if is_required else PortKind.OPTIONAL))
    return ports


def _typed(
    operator: CustomOperator, inputs: list[SchemaPort], outputs: list[SchemaPort], types: frozenset[DType]
) -> Iterator[tuple[DType | None, ...]]:
    """Yield the combinations of element types of one operator, for all ports of the schema."""
    ports = [*operator.inputs[: len(inputs)], *operator.outputs[: len(outputs)]]
    groups: dict[str, frozenset[DType]] = {}
    for number, port in enumerate(ports):
        name = port.constraint or f"#{number}"
        groups[name] = groups.get(name, types) & port.types
    lists = [sorted(allowed, key=lambda dtype: dtype.onnx) for allowed in groups.values()]
    for chosen in itertools.islice(itertools.product(*lists), MAX_COMBINATIONS + 1):
        dtype_of = dict(zip(groups, chosen, strict=True))
        given = [dtype_of[port.constraint or f"#{number}"] for number, port in enumerate(ports)]
        first, second = given[: len(operator.inputs[: len(inputs)])], given[len(operator.inputs[: len(inputs)]) :]
        yield (
            *first,
            *[None] * (len(inputs) - len(first)),
            *second,
            *[None] * (len(outputs) - len(second)),
        )


SCHEMAS: HandleTable[Schema] = HandleTable("operator of an application")


class _Domains:
    """The OrtCustomOpDomains of the operators registered now. None is ever released, because sessions refer to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._generation = -1
        self._array: Any = ffi.NULL
        self._count = 0
        self._kept: dict[tuple[CustomOperator, ...], list[Any]] = {}
        self._arrays: list[Any] = []

    def current(self) -> tuple[Any, int]:
        """Return the domains (``OrtCustomOpDomain *const *``) and their number."""
        snapshot = registry.current()
        with self._lock:
            if snapshot.generation != self._generation:
                rows: dict[tuple[str, str], list[CustomOperator]] = {}
                for operator in snapshot.operators:
                    if operator.is_own_schema:
                        rows.setdefault((operator.domain, operator.name), []).append(operator)
                made = [self._domain(name, rows) for name in dict.fromkeys(domain for domain, _ in rows)]
                self._array, self._count = ffi.new("OrtCustomOpDomain *[]", made), len(made)
                self._arrays.append(self._array)
                self._generation = snapshot.generation
            return self._array, self._count

    def _domain(self, name: str, rows: dict[tuple[str, str], list[CustomOperator]]) -> Any:
        ort = OrtCalls(host.api())
        domain = ort.out("CreateCustomOpDomain", "OrtCustomOpDomain *", name.encode())
        for (of, _), operators in rows.items():
            if of == name:
                for op in self._ops(tuple(operators)):
                    ort.call("CustomOpDomain_Add", domain, op)
        return domain

    def _ops(self, operators: tuple[CustomOperator, ...]) -> list[Any]:
        if operators not in self._kept:
            schema = schema_of(operators, _types_of_host())
            handle = SCHEMAS.add(schema)
            self._kept[operators] = [
                _create(operators[0].name, schema.since, handle, *ports) for ports in schema.combinations
            ]
        return self._kept[operators]


_domains = _Domains()


def custom_op_domains() -> tuple[Any, int]:
    """Return ``OrtCustomOpDomain *const *`` of the operators that are registered now, and the number of domains."""
    registry.discover()
    return _domains.current()


def _types_of_host() -> frozenset[DType]:
    ort = OrtCalls(host.api(), host.ep_api())
    types = set()
    for dtype in DType:
        if dtype.is_supported:
            try:
                ort.out("GetTensorDataType", "const OrtDataType *", dtype.ort)
            except OrtCallError:
                continue
            types.add(dtype)
    return frozenset(types)


def _create(name: str, since: int, handle: int, inputs: Sequence[SchemaPort], outputs: Sequence[SchemaPort]) -> Any:
    spec, error = ffi.new("ocp_custom_op_spec *"), new_error()
    text_of_name = ffi.new("char[]", name.encode())
    ports = ffi.new("ocp_custom_port[]", len(inputs) + len(outputs))
    for port, row in zip((*inputs, *outputs), ports, strict=True):
        row.dtype = _ANY if port.dtype is None else port.dtype.ort
        row.kind, row.minimum, row.is_homogeneous = port.kind, port.minimum, port.is_homogeneous
    spec.handle, spec.name, spec.since, spec.ports = handle, text_of_name, since, ports
    spec.num_inputs, spec.num_outputs = len(inputs), len(outputs)
    op = core().custom_op_create(spec, error)
    check(error)
    return op


# ---- shapes ----


def infer(schema: Schema, context: Any) -> None:
    """Infer the output shapes of a node for ONNX Runtime; ``context`` is ``const OrtShapeInferContext *``.

    If versions of the operator disagree about a result's type or rank, or the operator's function declines the node,
    ONNX Runtime gets no shape: the verdict on the node gives the reason. A dimension about which versions disagree is
    unknown.
    """
    ort = OrtCalls(host.api())
    inputs = _inputs(ort, context)
    if any(value is not None and value.shape is None for value in inputs):
        return
    found: list[list[tuple[DType, NamedShape]]] = []
    for operator in schema.operators:
        try:
            found.append(infer_results(operator, inputs, _attributes(ort, operator, context)))
        except (Unsupported, InvalidModel, ZeroDivisionError, OverflowError):
            if len(schema.operators) == 1:
                return
    for index, results in enumerate(zip(*found, strict=False)):
        dtypes, shapes = {dtype for dtype, _ in results}, [shape for _, shape in results]
        if len(dtypes) == 1 and len({len(shape) for shape in shapes}) == 1:
            _tell(ort, context, index, dtypes.pop(), _agreed(shapes))


def _agreed(shapes: Sequence[NamedShape]) -> NamedShape:
    return tuple(dims[0] if len(set(dims)) == 1 else unknown_dim() for dims in zip(*shapes, strict=True))


def _inputs(ort: OrtCalls, context: Any) -> list[Value | None]:
    values: list[Value | None] = []
    for index in range(ort.out("ShapeInferContext_GetInputCount", "size_t", context)):
        info = ort.out("ShapeInferContext_GetInputTypeShape", "OrtTensorTypeAndShapeInfo *", context, index)
        dtype = element_type(ort.out("GetTensorElementType", "ONNXTensorElementDataType", info))
        if dtype is None:
            values.append(None)
            continue
        rank = ort.out("GetDimensionsCount", "size_t", info)
        dims, names = ffi.new("int64_t[]", rank), ffi.new("const char *[]", rank)
        ort.call("GetDimensions", info, dims, rank)
        ort.call("GetSymbolicDimensions", info, names, rank)
        # ONNX Runtime passes a value of unknown rank as a scalar.
        shape = tuple(int(dim) if dim >= 0 else text(name) or None for dim, name in zip(dims, names, strict=True))
        values.append(Value(f"input {index}", dtype, shape or None))
    return values


def _attributes(ort: OrtCalls, operator: CustomOperator, context: Any) -> dict[str, AttrValue]:
    values: dict[str, AttrValue] = {}
    for attribute in operator.attributes:
        try:
            found = ort.out("ShapeInferContext_GetAttribute", "const OrtOpAttr *", context, attribute.name.encode())
        except OrtCallError:  # the node lacks the attribute
            continue
        value = None if found == ffi.NULL else read_attribute(ort, found)
        if value is not None:
            values[attribute.name] = value
    return values


def _tell(ort: OrtCalls, context: Any, index: int, dtype: DType, shape: NamedShape) -> None:
    info = ort.out("CreateTensorTypeAndShapeInfo", "OrtTensorTypeAndShapeInfo *")
    try:
        names = [ffi.new("char[]", dim.encode() if isinstance(dim, str) else b"") for dim in shape]
        ort.call("SetTensorElementType", info, dtype.ort)
        numbers = ffi.new("int64_t[]", [dim if isinstance(dim, int) else -1 for dim in shape])
        ort.call("SetDimensions", info, numbers, len(shape))
        ort.call("SetSymbolicDimensions", info, ffi.new("const char *[]", names), len(shape))
        ort.call("ShapeInferContext_SetOutputTypeShape", context, index, info)
    finally:
        ort.api.ReleaseTensorTypeAndShapeInfo(info)


# ---- nodes that no provider runs ----


def why_nobody_runs(schema: Schema, info: Any, verdicts: Sequence[NodeVerdict]) -> str:
    """Explain why the plugin declined the node of ``info`` (``const OrtKernelInfo *``), which no provider runs."""
    ort = OrtCalls(host.api())
    size = ffi.new("size_t *")
    status = host.api().KernelInfo_GetNodeName(info, ffi.NULL, size)
    if status != ffi.NULL:
        host.api().ReleaseStatus(status)
    buffer = ffi.new("char[]", max(int(size[0]), 1))
    ort.call("KernelInfo_GetNodeName", info, buffer, size)
    name, first = host.text(buffer), schema.operators[0]
    verdict = next((v for v in verdicts if (v.name, v.op_type, v.domain) == (name, first.name, first.domain)), None)
    reason = verdict.reason if verdict is not None and not verdict.supported else "the reason is not known"
    return f"node {name!r}: only {EP_NAME} runs {first.qualified_name}, and declined it: {reason}"
