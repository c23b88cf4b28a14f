"""The operator table: one function per ONNX operator and range of versions.

An operator is a plain function whose positional parameters are the ONNX inputs and whose keyword-only parameters are
the ONNX attributes with their names and defaults::

    @op("Gather", since=1, types={"T": ALL_TENSORS, "Tind": INDICES})
    def gather(ctx: Lowering, data: T, indices: Tind, *, axis: int = 0) -> Tensor: ...

An input's annotation names its ONNX type constraint: an alias such as ``T`` or ``Tind`` below. ``Tensor`` means the
only constraint, or else ``T``; ``Int64`` and ``Float32`` are inputs with a fixed type; ``HostTensor`` marks an integer
input that determines shapes, which the function reads by ``ctx.host_values``. An input that may be ``None`` is
optional, ``*inputs`` is variadic. `attributes_of` declares attributes that a function passes on to another; a
``TypedDict`` holds optional attributes that operators share, ``**window: Unpack[WindowAttributes]``. Several functions
may serve one operator: each serves the versions from its ``since`` until the ``since`` of the next function, or to its
own ``until``.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

from ort_cuda_plugin import uninterrupted

from ..model.ir import FLOATS_8, DType
from ..program.lowering.context import InvalidModel, Lowering, Tensor, Unsupported
from ..program.steps.containers import Operand
from . import requirements as require

FLOATS = frozenset({DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16, DType.FLOAT64})
SIGNED_INTS = frozenset({DType.INT8, DType.INT16, DType.INT32, DType.INT64})
UNSIGNED_INTS = frozenset({DType.UINT8, DType.UINT16, DType.UINT32, DType.UINT64})
INTS = SIGNED_INTS | UNSIGNED_INTS
INDICES = frozenset({DType.INT32, DType.INT64})
WIDE_INTS = INDICES | {DType.UINT32, DType.UINT64}
FLOAT32 = frozenset({DType.FLOAT32})
FLOAT_OR_HALF = frozenset({DType.FLOAT32, DType.FLOAT16})
UP_TO_FLOAT32 = FLOATS - {DType.FLOAT64}
NO_BFLOAT16 = FLOATS - {DType.BFLOAT16}
FLOAT16 = frozenset({DType.FLOAT16})
INT8 = frozenset({DType.INT8})
UINT8 = frozenset({DType.UINT8})
BYTES = INT8 | UINT8
INT32 = frozenset({DType.INT32})
INT64 = frozenset({DType.INT64})
BOOL = frozenset({DType.BOOL})
SIGNED = FLOATS | SIGNED_INTS
ARITHMETIC = FLOATS | INTS
PACKED = frozenset({DType.INT4, DType.UINT4, DType.INT2, DType.UINT2, DType.FLOAT4E2M1})
ALL_TENSORS = ARITHMETIC | FLOATS_8 | PACKED | {DType.FLOAT8E8M0} | BOOL

B: TypeAlias = Tensor
F: TypeAlias = Tensor
G: TypeAlias = Tensor
Gates: TypeAlias = Tensor
I: TypeAlias = Tensor  # noqa: E741 - the name in ONNX Runtime's schemas
Int32: TypeAlias = Tensor
Q: TypeAlias = Tensor
T4: TypeAlias = Tensor
T8: TypeAlias = Tensor
TA: TypeAlias = Tensor
TB: TypeAlias = Tensor
TC: TypeAlias = Tensor
TF: TypeAlias = Tensor
TI: TypeAlias = Tensor
TS: TypeAlias = Tensor
TV: TypeAlias = Tensor
TYZ: TypeAlias = Tensor
T_CACHE: TypeAlias = Tensor
T_KV_SCALE: TypeAlias = Tensor
Tid: TypeAlias = Tensor
M: TypeAlias = Tensor
S: TypeAlias = Tensor
T: TypeAlias = Tensor
T1: TypeAlias = Tensor
T2: TypeAlias = Tensor
T3: TypeAlias = Tensor
Tind: TypeAlias = Tensor
U: TypeAlias = Tensor
V: TypeAlias = Tensor
HostTensor: TypeAlias = Tensor
Int64: TypeAlias = Tensor
Float32: TypeAlias = Tensor

CHANNELS_LAST_DOMAIN = "com.ms.internal.nhwc"
"""ONNX Runtime's domain of ai.onnx operators whose first input and first output are channels-last."""

NEWEST_OPSETS = {"": 28, CHANNELS_LAST_DOMAIN: 28, "ai.onnx.ml": 5, "com.microsoft": 1}
"""Newest supported opset per domain; a newer version of an operator may have another meaning."""

NOT_TENSORS = {
    "ai.onnx.ml.CastMap": "takes maps",
    "ai.onnx.ml.DictVectorizer": "takes maps",
    "ai.onnx.ml.ZipMap": "returns a sequence of maps",
}
"""Operators that no provider can run on a device, with the reason."""

IGNORED_ATTRIBUTES = frozenset({"consumed_inputs"})
"""Hints of opset 1 that an operator may overwrite an input."""

# fmt: off
FLAGS = frozenset(
    {
        "across_channels", "align_corners", "allowzero", "antialias", "broadcast", "ceil_mode",
        "center_point_box", "channels_last", "count_include_pad", "detect_negative", "detect_positive",
        "do_rotary", "exclude_outside", "exclusive", "fmod", "input_forget", "interleaved", "inverse",
        "is_causal", "is_inner_broadcast", "is_test", "keepdims", "largest", "layout", "linear_before_reset",
        "noop_with_empty_axes", "normalize_variance", "onesided", "periodic", "reverse", "rotary_interleaved",
        "saturate", "select_last_index", "sorted", "spatial", "storage_order", "training_mode", "transA",
        "transB", "transBatchA", "transBatchB", "unidirectional", "upper",
    }
)
# fmt: on
"""Attributes that are 0 or 1. ONNX leaves other values undefined, and ONNX Runtime treats them inconsistently."""

OperatorFunction: TypeAlias = Callable[..., "Operand | tuple[Tensor, ...]"]
Function = TypeVar("Function", bound=OperatorFunction)


@dataclass(frozen=True)
class Operator:
    """A row of the operator table: ``function`` lowers the operator from version ``since`` on.

    ``until`` is the last version that it serves, None if only the next row of the operator limits it. ``containers`` is
    set if inputs or outputs are sequences or optional values, which exist inside a cluster only. ``names`` maps the
    names of type constraints in the function's annotations to this version's names, where they differ.
    """

    name: str
    domain: str
    since: int
    until: int | None
    types: Mapping[str, frozenset[DType]]
    function: OperatorFunction = field(repr=False)
    containers: bool = False
    names: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def _parameters(self) -> list[inspect.Parameter]:
        return list(inspect.signature(self.function).parameters.values())[1:]

    @cached_property
    def inputs(self) -> tuple[inspect.Parameter, ...]:
        """Return the parameters that are ONNX inputs; the last may be variadic."""
        return tuple(p for p in self._parameters if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD))

    @cached_property
    def attributes(self) -> Mapping[str, inspect.Parameter]:
        """Return the parameters that are ONNX attributes, by name, including those of a TypedDict."""
        own = {p.name: p for p in self._parameters if p.kind == p.KEYWORD_ONLY}
        families = [p for p in self._parameters if p.kind == p.VAR_KEYWORD]
        return own | {name: p for family in families for name, p in self._members(family)}

    def _members(self, family: inspect.Parameter) -> Iterator[tuple[str, inspect.Parameter]]:
        """Yield the attributes of ``**family: Unpack[TypedDict]``, optional unless they are ``Required``."""
        unpacked = eval(family.annotation, inspect.unwrap(self.function).__globals__)
        for name, annotation in unpacked.__args__[0].__annotations__.items():
            text = annotation.__forward_arg__
            kind = text.removeprefix("Required[").removesuffix("]") if text.startswith("Required[") else text
            default = None if kind == text else inspect.Parameter.empty
            yield name, inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)

    @cached_property
    def host_inputs(self) -> tuple[int, ...]:
        """Return the indices of the inputs that the host reads."""
        return tuple(i for i, p in enumerate(self.inputs) if self._annotation(p) == "HostTensor")

    @staticmethod
    def _annotation(parameter: inspect.Parameter) -> str:
        return str(parameter.annotation).removesuffix(" | None")

    @staticmethod
    def _is_optional(parameter: inspect.Parameter) -> bool:
        return parameter.default is not parameter.empty or str(parameter.annotation).endswith(" | None")

    def constraint(self, index: int) -> str:
        """Return the name of the type constraint of input ``index``, "" for none."""
        name = self._annotation(self.inputs[min(index, len(self.inputs) - 1)])
        if name == "Tensor":
            name = next(iter(self.types)) if len(self.types) == 1 else "T"
        name = self.names.get(name, name)
        return name if name in self.types else ""

    def _takes_container(self, index: int) -> bool:
        return index < len(self.inputs) and self._annotation(self.inputs[index]) == "Operand"

    def check_inputs(self, dtypes: Sequence[DType | None]) -> None:
        """Check the number and element types of a node's inputs; an entry of ``dtypes`` is None for an omitted input.

        Raises InvalidModel for a missing input, Unsupported("dtype") for an unsupported type, and Unsupported("op") for
        more inputs than this version has: the schema of a newer ORT may allow them.
        """
        variadic = bool(self.inputs) and self.inputs[-1].kind == inspect.Parameter.VAR_POSITIONAL
        if len(dtypes) > len(self.inputs) and not variadic:
            raise require.unsupported("op", "the number of inputs", len(dtypes), f"at most {len(self.inputs)}")
        for index, parameter in enumerate(self.inputs):
            missing = index >= len(dtypes) or dtypes[index] is None
            if missing and not self._is_optional(parameter) and parameter.kind != parameter.VAR_POSITIONAL:
                raise InvalidModel(f"{self.name}: the required input {index} is missing")
        for index, dtype in enumerate(dtypes):
            if dtype is None and variadic and index >= len(self.inputs) - 1:
                raise InvalidModel(f"{self.name}: the required input {index} is missing")
            constraint = self.constraint(index)
            if dtype is not None and constraint and dtype not in self.types[constraint]:
                served = ", ".join(sorted(x.short for x in self.types[constraint]))
                what = f"the type of input {index} (type constraint {constraint})"
                raise require.unsupported("dtype", what, dtype.short, served)

    def bind_attributes(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """Return keyword arguments for ``function``.

        Raises Unsupported("attribute") for an unknown attribute and for a flag that is neither 0 nor 1, InvalidModel
        for a missing required attribute.
        """
        if self.since == 1:
            attributes = {name: value for name, value in attributes.items() if name not in IGNORED_ATTRIBUTES}
        for name, value in attributes.items():
            if name not in self.attributes:
                known = ", ".join(self.attributes) or "no attributes"
                raise require.unsupported("attribute", f"the attribute {name!r}", "unknown", known)
            require.supported(name not in FLAGS or value in (0, 1), "attribute", name, repr(value), "0, 1")
        for name, parameter in self.attributes.items():
            if parameter.default is parameter.empty and name not in attributes:
                raise InvalidModel(f"{self.name}: the required attribute {name!r} is missing")
        return dict(attributes)

    def lower(
        self, ctx: Lowering, inputs: Sequence[Operand | None], attributes: Mapping[str, Any]
    ) -> tuple[Operand, ...]:
        """Run the operator's function; return the node's outputs in order, perhaps fewer.

        Raises Unsupported or InvalidModel from the checks of inputs and attributes, and from the function. The
        operator's name precedes the reason of Unsupported, which is shown without the node.
        """
        try:
            for index, x in enumerate(inputs):
                if not isinstance(x, Tensor | None) and not self._takes_container(index):
                    raise require.unsupported("dtype", f"input {index}", "a sequence or an optional value", "tensors")
            self.check_inputs([None if x is None else x.dtype for x in inputs])
            result = self.function(ctx, *inputs, **self.bind_attributes(attributes))
        except Unsupported as error:
            error.reason = f"{self.name}: {error.reason}"
            error.args = (error.reason,)
            raise
        return result if isinstance(result, tuple) else (result,)


_table: dict[tuple[str, str], list[Operator]] = {}


def op(
    name: str,
    *,
    domain: str = "",
    since: int = 1,
    until: int | None = None,
    types: Mapping[str, frozenset[DType]] | None = None,
    containers: bool = False,
    names: Mapping[str, str] | None = None,
) -> Callable[[Function], Function]:
    """Register a function in the table. Decorators stack, for operators and domains that share a function.

    ``since`` is the first version that the function serves, ``types`` maps ONNX constraint names to supported types,
    ``containers`` and ``names`` as in `Operator`. Raises ValueError for a duplicate ``since`` of an operator.
    """

    def enter(function: Function) -> Function:
        versions = _table.setdefault((domain, name), [])
        if any(entry.since == since for entry in versions):
            raise ValueError(f"operator {name}: two functions declare since={since}. Declare another version")
        versions.append(Operator(name, domain, since, until, types or {}, function, containers, names or {}))
        versions.sort(key=lambda entry: entry.since)
        return function

    return enter


def with_numbers(function: Function, defaults: Mapping[str, float | None], inputs: int = 2) -> Function:
    """Declare float attributes of a function that takes them as ``**attributes``.

    The first ``inputs`` parameters are not attributes; the others become attributes unchanged.
    """
    *parameters, _ = inspect.signature(function).parameters.values()
    own = [p.replace(kind=p.KEYWORD_ONLY) for p in parameters[inputs:]]
    numbers = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation="float")
        for name, value in defaults.items()
    ]
    function.__signature__ = inspect.Signature([*parameters[:inputs], *own, *numbers])  # type: ignore[attr-defined]
    return function


def attributes_of(source: Callable[..., Any], names: Collection[str] | None = None) -> Callable[[Function], Function]:
    """Declare the keyword parameters of ``source`` as attributes of a function that passes them on.

    The decorated function, which is not an operator yet, takes them as ``**attributes: Any``. ``names`` limits them.
    """
    parameters = inspect.signature(source).parameters.values()
    keywords = [p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]
    passed = [p for p in keywords if names is None or p.name in names]

    def declare(function: Function) -> Function:
        *own, _ = inspect.signature(function).parameters.values()
        function.__signature__ = inspect.Signature([*own, *passed])  # type: ignore[attr-defined]
        return function

    return declare


def contrib_op(name: str, **types: frozenset[DType]) -> Callable[[Function], Function]:
    """Register an operator of com.microsoft, whose only version is 1; ``types`` as in `op`."""
    return op(name, domain="com.microsoft", types=types)


@functools.cache
def _load() -> None:
    """Import all modules below ort_cuda_plugin.ops, which register their operators."""
    package = importlib.import_module("ort_cuda_plugin.ops")

    def import_all() -> None:
        for module in pkgutil.walk_packages(package.__path__, "ort_cuda_plugin.ops."):
            importlib.import_module(module.name)

    uninterrupted.call(import_all)


def lookup(domain: str, op_type: str, since_version: int) -> Operator:
    """Return the operator that serves a node; ``since_version`` is the version of the node's ONNX schema.

    Raises Unsupported("op") for an operator that the table lacks, Unsupported("version") for a version that no function
    serves or that is newer than `NEWEST_OPSETS`.
    """
    _load()
    domain = "" if domain == "ai.onnx" else domain
    versions = _table.get((domain, op_type))
    qualified = f"{domain}.{op_type}" if domain else op_type
    if not versions:
        why = NOT_TENSORS.get(qualified)
        raise Unsupported("op", f"{qualified} is not implemented" + (f": it {why}" if why else ""))
    if since_version > NEWEST_OPSETS.get(domain, since_version):
        raise Unsupported(
            "version",
            f"{qualified}-{since_version} is newer than opset {NEWEST_OPSETS[domain]}, the newest that the plugin has",
        )
    serving = [entry for entry in versions if entry.since <= since_version]
    if not serving or (serving[-1].until is not None and since_version > serving[-1].until):
        raise Unsupported(
            "version",
            f"{qualified}-{since_version} is not implemented; docs/operators.md lists the supported versions of "
            f"{op_type}",
        )
    return serving[-1]


def is_built_in(domain: str, op_type: str, since_version: int) -> bool:
    """Return whether the operator table has a function for a node; arguments as for `lookup`."""
    try:
        lookup(domain, op_type, since_version)
    except Unsupported:
        return False
    return True


def versions(domain: str, op_type: str) -> tuple[Operator, ...]:
    """Return the registered declarations of an operator, in order of versions."""
    return tuple(_table.get((domain, op_type), ()))


def channels_last_operators() -> tuple[str, ...]:
    """Return the names of the ai.onnx operators that are registered in `CHANNELS_LAST_DOMAIN` as well."""
    _load()
    return tuple(name for domain, name in sorted(_table) if domain == CHANNELS_LAST_DOMAIN)


def operators() -> Iterable[Operator]:
    """Return all rows of the table for operators on tensors (not sequences), ordered by domain, name and version."""
    _load()
    return [entry for key in sorted(_table) for entry in _table[key] if not entry.containers]
