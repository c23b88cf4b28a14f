"""Defines the record of a custom operator, which all ways of writing an operator produce."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from ..model.ir import AttrValue, Constant, DType, InvalidModel, NodeError, Unsupported
from ..program.lowering.context import Buffer, BufferKind, Lowering, Tensor
from ..program.steps.trace import Launch, in_place_of
from .report import report_failure

HOST_DOMAINS: Final = frozenset(
    {
        "",
        "ai.onnx.ml",
        "ai.onnx.preview",
        "ai.onnx.preview.training",
        "ai.onnx.training",
        "com.microsoft",
        "com.microsoft.dml",
        "com.microsoft.experimental",
        "com.microsoft.nchwc",
        "com.ms.internal.nhwc",
        "org.pytorch.aten",
    }
)
"""Domains whose operators ONNX Runtime defines. A custom operator in such a domain replaces a built-in one."""

MAX_VERSION: Final = 1000
"""Newest version of a custom domain that ONNX Runtime accepts."""


class PortKind(enum.IntEnum):
    """Whether an input or output is required, optional or variadic; as ``OrtCustomOpInputOutputCharacteristic``."""

    REQUIRED = 0
    OPTIONAL = 1
    VARIADIC = 2


class AttributeKind(enum.IntEnum):
    """The type of an attribute; the numbers are those of ``OrtOpAttrType``."""

    INT = 1
    INTS = 2
    FLOAT = 3
    FLOATS = 4
    STRING = 5
    STRINGS = 6
    TENSOR = 8


@dataclass(frozen=True)
class Port:
    """An input or an output of an operator.

    Attributes:
        types: the allowed element types.
        constraint: inputs and outputs with the same constraint have the same element type; "": no constraint.
        minimum: minimum number of tensors of a variadic port.
        on_host: whether each Run copies the input's contents to the host, because they determine shapes.
        alias: the index of the input whose memory the output shares; None: the output has its own memory.
    """

    name: str
    types: Set[DType]
    constraint: str = ""
    kind: PortKind = PortKind.REQUIRED
    minimum: int = 1
    on_host: bool = False
    alias: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "types", frozenset(self.types))


@dataclass(frozen=True)
class Attribute:
    """An attribute of a custom operator. A node must have it if ``default`` is None, unless it is ``optional``."""

    name: str
    kind: AttributeKind
    default: AttrValue | bool | None = None
    optional: bool = False
    is_flag: bool = False

    def checked(self, value: AttrValue, operator: str) -> AttrValue | bool:
        """Return the attribute's ``value`` converted for the author's code.

        Raises InvalidModel for a value of another type, or for a flag other than 0 and 1.
        """
        if self.kind is AttributeKind.FLOAT and type(value) is int:
            return float(value)
        if self.kind is AttributeKind.FLOATS and isinstance(value, tuple) and all(type(x) is int for x in value):
            return tuple(float(x) for x in value)
        single, element = _PYTHON_TYPES[self.kind]
        elements = value if isinstance(value, tuple) and element is not None else ()
        fits = isinstance(value, single) and all(isinstance(x, element or object) for x in elements)
        if not fits:
            wanted = self.kind.name.lower()
            raise InvalidModel(f"{operator}: attribute {self.name!r} = {_shown(value)}: expected the type {wanted!r}")
        if self.is_flag:
            if value not in (0, 1):
                raise InvalidModel(f"{operator}: attribute {self.name!r} = {value!r}: expected 0 or 1")
            return bool(value)
        return value


_PYTHON_TYPES: Final[Mapping[AttributeKind, tuple[type[Any], type[Any] | None]]] = {
    AttributeKind.INT: (int, None),
    AttributeKind.INTS: (tuple, int),
    AttributeKind.FLOAT: (float, None),
    AttributeKind.FLOATS: (tuple, float),
    AttributeKind.STRING: (str, None),
    AttributeKind.STRINGS: (tuple, str),
    AttributeKind.TENSOR: (Constant, None),
}


def _shown(value: object) -> str:
    text = f"a tensor of {value.dtype.name}{list(value.shape)}" if isinstance(value, Constant) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


LowerFunction: TypeAlias = "Callable[[Lowering, Sequence[Tensor | None], Mapping[str, Any]], Sequence[Tensor]]"


@dataclass(frozen=True, eq=False)
class CustomOperator:
    """An operator of an application or of an installed package.

    ``function(ctx, inputs, attributes)`` works like the operators' functions in ``ops/``: it records the computation in
    the context and returns the output tensors. ``inputs`` has an entry for each input of the node, None for an omitted
    one; ``attributes`` has every attribute, including defaults. The function runs on symbolic shapes when ONNX Runtime
    asks for shapes and for claims, and again for each plan.

    Attributes:
        version: the domain's first version that the operator implements.
        priority: if several operators serve a node, the one with the highest priority is tried first; the plugin's own
            operators have 0.
        origin: the package or module that registered it, for messages.
        definition: the qualified name of the author's function in its module. A new operator replaces an operator of
            the same definition, for example when a notebook cell runs again.
    """

    name: str
    domain: str
    version: int
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    attributes: tuple[Attribute, ...]
    function: LowerFunction = field(repr=False)
    priority: int = 0
    origin: str = ""
    definition: str = ""

    def __post_init__(self) -> None:
        """Check the record. Raises ValueError for values that ONNX Runtime would reject."""
        if not re.fullmatch(r"[A-Za-z_]\w*", self.name, re.ASCII):
            raise ValueError(
                f"{self.name!r} is not the name of an operator: use letters, digits and _, with no digit first"
            )
        if not re.fullmatch(r"(\w[\w.-]*)?", self.domain, re.ASCII):
            raise ValueError(
                f"{self.domain!r} is not the name of a domain: use letters, digits, '_', '.' and '-', with no '.' or "
                "'-' first"
            )
        if type(self.version) is not int or not 1 <= self.version <= MAX_VERSION:
            raise ValueError(f"{self.label}: version {self.version!r}, expected a number from 1 to {MAX_VERSION}")
        if type(self.priority) is not int:
            raise ValueError(f"{self.label}: priority {self.priority!r}, expected an integer")
        for what, ports in (("input", self.inputs), ("output", self.outputs)):
            for port in ports[:-1]:
                if port.kind is PortKind.VARIADIC:
                    raise ValueError(f"{self.label}: only the last {what} may be variadic, not {port.name!r}")
            for port in ports:
                if not port.types or not all(dtype.is_supported for dtype in port.types):
                    names = ", ".join(dtype.name for dtype in port.types) or "none"
                    raise ValueError(
                        f"{self.label}: {what} {port.name!r}: got the element types {names}, expected at least one, "
                        "each a type of tensors in device memory"
                    )
        if not self.outputs:
            raise ValueError(f"{self.label}: got no outputs, expected at least one")

    @property
    def qualified_name(self) -> str:
        return f"{self.domain or 'ai.onnx'}::{self.name}"

    @property
    def label(self) -> str:
        """Return the operator's name in messages, such as "my.domain::CircularPad-1"."""
        return f"{self.qualified_name}-{self.version}"

    @property
    def description(self) -> str:
        """Return the text by which `explain` says that this operator implements a node."""
        origin = f" of {self.origin}" if self.origin else ""
        return f"run by {self.label}{origin}" + (f", priority {self.priority}" if self.priority else "")

    @property
    def is_own_schema(self) -> bool:
        """Return whether ONNX Runtime gets the operator's schema from the plugin, because it defines none itself."""
        return self.domain not in HOST_DOMAINS

    @property
    def host_inputs(self) -> tuple[int, ...]:
        """Return the indices of the inputs whose contents the host reads."""
        return tuple(index for index, port in enumerate(self.inputs) if port.on_host)

    def port(self, ports: Sequence[Port], index: int) -> Port:
        """Return the port of ``ports`` for a node's tensor ``index``. Raises InvalidModel if the operator has fewer."""
        if index < len(ports):
            return ports[index]
        if ports and ports[-1].kind is PortKind.VARIADIC:
            return ports[-1]
        kind = "outputs" if ports is self.outputs else "inputs"
        raise InvalidModel(
            f"{self.label}: got at least {index + 1} {kind}, expected at most the {len(ports)} that the operator "
            "declares"
        )

    def bound_attributes(self, attributes: Mapping[str, AttrValue]) -> dict[str, Any]:
        """Return the attributes for the author's function.

        Raises InvalidModel for an unknown, missing or mistyped one.
        """
        known = {attribute.name: attribute for attribute in self.attributes}
        for name, value in attributes.items():
            if name not in known:
                names = ", ".join(known) or "none"
                raise InvalidModel(
                    f"{self.label}: unknown attribute {name!r} = {_shown(value)}; the operator has {names}"
                )
        bound: dict[str, Any] = {}
        for name, attribute in known.items():
            if name in attributes:
                bound[name] = attribute.checked(attributes[name], self.label)
            elif attribute.default is None and not attribute.optional:
                raise InvalidModel(f"{self.label}: the required attribute {name!r} is missing")
            else:
                bound[name] = attribute.default
        return bound

    def check_inputs(self, dtypes: Sequence[DType | None]) -> dict[str, DType]:
        """Check the element types of a node's inputs, and return the type that each type constraint got.

        Raises InvalidModel for a wrong number of inputs, Unsupported("dtype") for a type that an input cannot have.
        """
        bound: dict[str, DType] = {}
        for index, port in enumerate(self.inputs):
            given = sum(dtype is not None for dtype in dtypes[index:])
            if port.kind is PortKind.VARIADIC and given < port.minimum:
                raise InvalidModel(
                    f"{self.label}: got {given} tensors for input {port.name!r}, expected at least {port.minimum}"
                )
            if port.kind is PortKind.REQUIRED and (index >= len(dtypes) or dtypes[index] is None):
                raise InvalidModel(f"{self.label}: the required input {port.name!r} is missing")
        for index, dtype in enumerate(dtypes):
            port = self.port(self.inputs, index)
            if dtype is None:
                continue
            if dtype not in port.types:
                names = ", ".join(sorted(known.name for known in port.types))
                raise Unsupported("dtype", f"{self.label}: input {port.name!r} is {dtype.name}; supported: {names}")
            first = bound.setdefault(port.constraint, dtype) if port.constraint else dtype
            if first is not dtype:
                pair = f"{first.name} and {dtype.name}"
                raise InvalidModel(
                    f"{self.label}: inputs of the type constraint {port.constraint!r} are {pair}, expected one type"
                )
        return bound

    def lower(
        self, ctx: Lowering, inputs: Sequence[Tensor | None], attributes: Mapping[str, AttrValue]
    ) -> tuple[Tensor, ...]:
        """Run the author's function on checked inputs and attributes, and check its results.

        Raises InvalidModel if the node contradicts the operator, and Unsupported if the function declines the node or
        raises another exception, whose traceback goes to the log.
        """
        types = self.check_inputs([None if x is None else x.dtype for x in inputs])
        bound = self.bound_attributes(attributes)
        before, ctx.checks_author = ctx.checks_author, True
        first = len(ctx.trace.steps)
        try:
            results = self._checked_outputs(self.guarded(self.function, ctx, inputs, bound), types)
        finally:
            ctx.checks_author = before
        if not ctx.is_guess:
            written = {x.buffer for x in inputs if x is not None}
            written.update(buffer for step in ctx.trace.steps[first:] for buffer in step.writes)
            self._check_written(results, written)
        for port, result in zip(self.outputs, results, strict=False):
            owner = None if port.alias is None else inputs[port.alias]
            if owner is not None and (owner.dtype, owner.shape) != (result.dtype, result.shape):
                alias = self.inputs[port.alias or 0].name
                got, expected = (f"{x.dtype.name}{list(x.shape)}" for x in (result, owner))
                raise Unsupported(
                    "shape", f"{self.label}: output {port.name!r}, an alias of {alias!r}, is {got}, expected {expected}"
                )
            for step in ctx.trace.steps[first:]:
                if isinstance(step, Launch) and result.buffer in step.writes:
                    step.in_place += in_place_of(owner, result)
        return results

    def _check_written(self, results: Sequence[Tensor], written: Collection[Buffer]) -> None:
        """Check that recorded steps write all outputs: an unwritten one would have its memory's former contents."""
        for index, result in enumerate(results):
            buffer = result.buffer
            if buffer.kind is BufferKind.SCRATCH and buffer not in written and result.size != 0:
                name = self.port(self.outputs, index).name
                raise InvalidModel(f"{self.label}: nothing writes output {name!r}: launch a kernel that does")

    def guarded(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the author's code. Its unexpected exceptions become Unsupported, with the traceback in the log.

        Unsupported, NodeError, InvalidModel and KeyboardInterrupt are passed on; InvalidModel gets the operator's name.
        """
        try:
            return function(*arguments)
        except (Unsupported, NodeError):
            raise
        except InvalidModel as error:
            if error.reason.startswith(self.label):
                raise
            raise InvalidModel(f"{self.label}: {error.reason}") from error
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            report_failure(self.label, error)
            raise Unsupported("op", f"{self.label} failed with {type(error).__name__}: {error}") from error

    def _checked_outputs(self, results: object, types: dict[str, DType]) -> tuple[Tensor, ...]:
        given = tuple(results) if isinstance(results, (tuple, list)) else (results,)
        required = sum(port.kind is PortKind.REQUIRED for port in self.outputs)
        most = None if self.outputs[-1].kind is PortKind.VARIADIC else len(self.outputs)
        if len(given) < required or len(given) > (most or len(given)):
            bounds = f"{required} or more" if most is None else f"{required} to {most}" if most > required else required
            raise Unsupported("op", f"{self.label} returned {len(given)} outputs, expected {bounds}")
        for index, tensor in enumerate(given):
            if not isinstance(tensor, Tensor):
                raise Unsupported(
                    "op", f"{self.label} returned {type(tensor).__name__} for output {index}, expected a tensor"
                )
            port = self.port(self.outputs, index)
            wanted = types.setdefault(port.constraint, tensor.dtype) if port.constraint else tensor.dtype
            if tensor.dtype not in port.types or tensor.dtype is not wanted:
                names = wanted.name if tensor.dtype is not wanted else ", ".join(sorted(t.name for t in port.types))
                raise Unsupported(
                    "op", f"{self.label} returned {tensor.dtype.name} for output {port.name!r}, expected {names}"
                )
        return given
