"""Reader of ONNX Runtime's schemas of an operator, version by version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ...abi.core import ffi
from ..ir import DType
from .ort_calls import OrtCalls, text

_NEWEST: Final = 2**31 - 1

_NAMES: Final[Mapping[DType, str]] = {
    DType.FLOAT32: "float",
    DType.FLOAT64: "double",
}


def type_name(dtype: DType) -> str:
    """Return the name of a tensor type in schemas, such as "tensor(float)"."""
    return f"tensor({_NAMES.get(dtype, dtype.name.lower())})"


TENSOR_TYPES: Final[Mapping[str, DType]] = {type_name(dtype): dtype for dtype in DType}


@dataclass(frozen=True)
class OpSchema:
    """Schema of one version of an operator.

    ``inputs`` and ``outputs`` have the type constraint of each, "" if the type is fixed. ``constraints`` has, by name,
    the tensor types that a constraint allows, without other types, such as sequences.
    """

    name: str
    domain: str
    since: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constraints: Mapping[str, frozenset[DType]]


def read_schemas(ort: OrtCalls, name: str, domain: str) -> Iterator[OpSchema]:
    """Yield ORT's schemas of an operator, the newest first; none if ORT has no schema. ``ort`` calls the OrtEpApi.

    Raises:
        OrtCallError: a call of ORT's API failed.
    """
    newest = _NEWEST
    while newest > 0:
        schema = _schema(ort, name, domain, newest)
        if schema is None:
            return
        yield schema
        newest = schema.since - 1


def _schema(ort: OrtCalls, name: str, domain: str, newest: int) -> OpSchema | None:
    pointer = ort.out("GetOpSchema", "OrtOpSchema *", name.encode(), newest, domain.encode())
    if pointer == ffi.NULL:
        return None
    try:
        count = ort.out("OpSchema_GetTypeConstraintCount", "size_t", pointer)
        constraints = [
            ort.out("OpSchema_GetTypeConstraint", "const OrtOpSchemaTypeConstraint *", pointer, i) for i in range(count)
        ]
        return OpSchema(
            name,
            domain,
            int(ort.out("OpSchema_GetSinceVersion", "int", pointer)),
            _constraint_names(ort, pointer, "Input"),
            _constraint_names(ort, pointer, "Output"),
            {_constraint_name(ort, constraint): _allowed_types(ort, constraint) for constraint in constraints},
        )
    finally:
        ort.functions.ReleaseOpSchema(pointer)


def _constraint_names(ort: OrtCalls, schema: Any, side: str) -> tuple[str, ...]:
    count = ort.out(f"OpSchema_GetNum{side}s", "size_t", schema)
    getter = f"OpSchema_Get{side}TypeConstraint"
    return tuple(
        _constraint_name(ort, ort.out(getter, "const OrtOpSchemaTypeConstraint *", schema, i)) for i in range(count)
    )


def _constraint_name(ort: OrtCalls, constraint: Any) -> str:
    if constraint == ffi.NULL:
        return ""
    return text(ort.out("OpSchemaTypeConstraint_GetTypeParamName", "const char *", constraint))


def _allowed_types(ort: OrtCalls, constraint: Any) -> frozenset[DType]:
    names, count = ffi.new("const char *const **"), ffi.new("size_t *")
    ort.call("OpSchemaTypeConstraint_GetAllowedTypes", constraint, names, count)
    found: Sequence[DType | None] = [TENSOR_TYPES.get(text(names[0][i])) for i in range(count[0])]
    return frozenset(dtype for dtype in found if dtype is not None)
