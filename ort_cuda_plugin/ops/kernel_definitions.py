"""Kernel definitions for ONNX Runtime's kernel registry, one per schema version of each operator in the table."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..model.ir import DType, Unsupported
from ..model.ort.ort_schema import OpSchema
from .registry import Operator, lookup, operators

UNLIMITED: Final = 2**31 - 1
"""Value of `KernelDefinition.until` for a kernel that serves an operator's newest schema."""

_VIEWS: Final = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
# fmt: off
#: Elementwise operators: the result may overwrite the first input if both have the same shape.
_IN_PLACE: Final = frozenset(
    {
        "Abs", "Acos", "Acosh", "Add", "Asin", "Asinh", "Atan", "Atanh", "BitwiseNot", "Ceil", "Celu", "Clip", "Cos",
        "Cosh", "Div", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Log", "Mish",
        "Mul", "Neg", "Not", "Pow", "PRelu", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign", "Sin", "Sinh",
        "Softplus", "Softsign", "Sqrt", "Sub", "Swish", "Tan", "Tanh", "ThresholdedRelu",
    }
)
# fmt: on
#: Operators whose result is in host memory. They do not read the contents of their input.
HOST_RESULTS: Final = frozenset({"Shape", "Size"})


def is_view(domain: str, name: str) -> bool:
    """Return whether the output is the first input with another shape: ORT may then give both one buffer."""
    return domain == "" and name in _VIEWS


@dataclass(frozen=True)
class KernelDefinition:
    """Definition of a kernel for ORT's registry.

    Attributes:
        name, domain: operator.
        since, until: first and last opset version that the kernel serves.
        types: supported element types, by type constraint.
        host_inputs: indices of inputs that the kernel needs in host memory.
        host_outputs: indices of outputs that the kernel writes in host memory.
        is_view: the output may always alias the first input.
        is_in_place: the output may alias the first input after its last use.
    """

    name: str
    domain: str
    since: int
    until: int
    types: Mapping[str, tuple[DType, ...]]
    host_inputs: tuple[int, ...] = ()
    host_outputs: tuple[int, ...] = ()
    is_view: bool = False
    is_in_place: bool = False

    @property
    def in_host_memory(self) -> str:
        """Describe the operator's tensors in host memory; "" if there are none."""
        if self.host_outputs:
            return f"the result of {self.name}"
        return f"{self.name} {' '.join(map(str, self.host_inputs))}" if self.host_inputs else ""


@dataclass(frozen=True)
class Mismatch:
    """A declaration in the operator table that contradicts ORT's schema, so that ORT would never select its kernel."""

    name: str
    domain: str
    since: int
    constraint: str
    reason: str

    def __str__(self) -> str:
        operator = f"{self.domain}.{self.name}" if self.domain else self.name
        return f"{operator}-{self.since}, type constraint {self.constraint!r}: {self.reason}"


def kernel_definitions(
    schemas: Callable[[str, str], Iterable[OpSchema]],
) -> tuple[list[KernelDefinition], list[Mismatch]]:
    """Return the kernel definitions of all operators in the table, and the mismatches of the table.

    ``schemas(name, domain)`` returns all versions of an operator's schema, newest first. An operator without schemas
    has no kernels.
    """
    definitions: list[KernelDefinition] = []
    mismatches: list[Mismatch] = []
    for name, domain in dict.fromkeys((row.name, row.domain) for row in operators()):
        served: dict[int, tuple[Operator, list[OpSchema]]] = {}
        until = UNLIMITED
        for schema in schemas(name, domain):
            with contextlib.suppress(Unsupported):
                row = lookup(domain, name, schema.since)
                definition = _definition(row, schema, until)
                if all(definition.types.values()):
                    definitions.append(definition)
                served.setdefault(row.since, (row, []))[1].append(schema)
            until = schema.since - 1
        for row, versions in served.values():
            mismatches += _mismatches(row, versions)
    return definitions, mismatches


def _mismatches(row: Operator, versions: Sequence[OpSchema]) -> Iterable[Mismatch]:
    """Yield the mismatches of a table row. At least one schema version must have each type constraint of the row."""
    newest = versions[0]
    wrong = functools.partial(Mismatch, row.name, row.domain)
    for constraint in row.types:
        if not any(constraint in schema.constraints for schema in versions):
            known = ", ".join(newest.constraints) or "none"
            yield wrong(newest.since, constraint, f"ONNX Runtime's schema has no such type constraint, only {known}")
    for schema in versions:
        for index, actual in enumerate(schema.inputs[: len(row.inputs)]):
            declared = row.constraint(index)
            if not actual or declared not in schema.constraints or declared == actual:
                continue
            if actual in row.types or not _supported_types(row, schema, actual):
                reason = f"in ONNX Runtime's schema, input {index} has the type constraint {actual!r}"
                yield wrong(schema.since, declared, reason)


def _definition(row: Operator, schema: OpSchema, until: int) -> KernelDefinition:
    types = {
        constraint: tuple(sorted(_supported_types(row, schema, constraint), key=lambda t: t.onnx))
        for constraint, allowed in schema.constraints.items()
        if allowed  # a constraint without tensor types cannot be declared to ORT
    }
    host_results = schema.domain == "" and schema.name in HOST_RESULTS
    return KernelDefinition(
        schema.name,
        schema.domain,
        schema.since,
        until,
        types,
        host_inputs=tuple(index for index in row.host_inputs if index < len(schema.inputs)),
        host_outputs=(0,) if host_results else (),
        is_view=is_view(row.domain, row.name),
        is_in_place=schema.domain == "" and schema.name in _IN_PLACE,
    )


def _supported_types(row: Operator, schema: OpSchema, constraint: str) -> frozenset[DType]:
    """Return the element types that the row supports for a type constraint of the schema.

    A newer ORT may split a constraint: its schema then has several constraints for inputs that share one in the row.
    Each of these has the row's types, as far as the schema allows them.
    """
    types = row.types.get(constraint)
    if types is None:
        types = schema.constraints[constraint]
        for index, actual in enumerate(schema.inputs[: len(row.inputs)]):
            if actual == constraint and (declared := row.constraint(index)):
                types &= row.types[declared]
    return frozenset(dtype for dtype in types if dtype.is_supported)
