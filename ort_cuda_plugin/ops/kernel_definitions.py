"""The operator table as kernels that ONNX Runtime can look up: one for each version of an operator that ORT knows."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from ort_cuda_plugin.model.ir import DType, Unsupported
from ort_cuda_plugin.model.ort.ort_schema import OpSchema
from ort_cuda_plugin.ops.registry import Operator, lookup, operators

UNLIMITED: Final = 2**31 - 1
"""The last version of a kernel that serves an operator's newest schema."""

_VIEWS: Final = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
# fmt: off
#: Each element of the result depends on the element at its place, so it may take its place in memory.
_IN_PLACE: Final = frozenset(
    {
        "Abs", "Acos", "Acosh", "Add", "Asin", "Asinh", "Atan", "Atanh", "BitwiseNot", "Ceil", "Celu", "Clip", "Cos",
        "Cosh", "Div", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Log", "Mish",
        "Mul", "Neg", "Not", "Pow", "PRelu", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign", "Sin", "Sinh",
        "Softplus", "Softsign", "Sqrt", "Sub", "Swish", "Tan", "Tanh", "ThresholdedRelu",
    }
)
# fmt: on
#: Operators whose results are in host memory: they do not touch the contents of their input.
HOST_RESULTS: Final = frozenset({"Shape", "Size"})


class HasName(Protocol):
    """An operator, built in or of an application."""

    @property
    def name(self) -> str: ...

    @property
    def domain(self) -> str: ...


def is_view(operator: HasName) -> bool:
    """Whether the output has the elements of the first input in their order, so that ORT may give both one buffer."""
    return operator.domain == "" and operator.name in _VIEWS


@dataclass(frozen=True)
class KernelDefinition:
    """Definition of a kernel for ORT's registry.

    Attributes:
        name, domain: of the operator.
        since, until: the first and the last version of its schema.
        types: the element types that each type constraint may have.
        host_inputs: positions of the inputs that the kernel wants in host memory.
        host_outputs: positions of the outputs that it leaves there.
        is_view: its output may be its first input's memory.
        is_in_place: so may it, where no other node reads the input afterwards.
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
        """The operator and what of it is in host memory, as text; "" where nothing is."""
        if self.host_outputs:
            return f"the result of {self.name}"
        return f"{self.name} {' '.join(map(str, self.host_inputs))}" if self.host_inputs else ""


@dataclass(frozen=True)
class Mismatch:
    """A declaration of the operator table that contradicts ORT's schema: a kernel of it would never be chosen."""

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
    """The kernels of all operators, and what in the table is wrong.

    ``schemas`` gives all versions of the operator with a name and a domain, the newest first. An operator that it does
    not know has no kernels.
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
    """A row may name a constraint that some of its versions do not have yet."""
    newest = versions[0]
    wrong = functools.partial(Mismatch, row.name, row.domain)
    for constraint in row.types:
        if not any(constraint in schema.constraints for schema in versions):
            known = ", ".join(newest.constraints) or "none"
            yield wrong(newest.since, constraint, f"the schema has no such constraint, only {known}")
    for schema in versions:
        for index, actual in enumerate(schema.inputs[: len(row.inputs)]):
            declared = row.constraint(index)
            if actual and declared in schema.constraints and declared != actual:
                yield wrong(schema.since, declared, f"input {index} has the constraint {actual!r}")


def _definition(row: Operator, schema: OpSchema, until: int) -> KernelDefinition:
    types = {
        constraint: tuple(sorted(filter(_is_supported, row.types.get(constraint, allowed)), key=lambda t: t.onnx))
        for constraint, allowed in schema.constraints.items()
        if allowed  # else it has other types than tensors, which ORT cannot be told
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
        is_view=is_view(row),
        is_in_place=schema.domain == "" and schema.name in _IN_PLACE,
    )


def _is_supported(dtype: DType) -> bool:
    return dtype.is_supported
