"""The decorator `op`: makes a custom operator from a typed function, whose signature is the schema.

::

    @op("my.domain::Swish", version=1)
    def swish(ctx: Lowering, x: T, *, beta: float = 1.0) -> T:
        return elementwise(ctx, lambda a: a * sigmoid(beta * a), x)

Positional parameters after the context are inputs, keyword-only ones are attributes, annotated as in `tensor_types`. An
input that may be ``None`` is optional, ``*inputs`` is variadic. The function defines both shapes and computation. It
calls functions of the built-in operators, such as ``elementwise``, whose steps are fused as in a built-in operator, or
launches kernels (`kernels.launch`).
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, Final, Generic, ParamSpec, TypeVar, get_args, get_origin

from ..model.ir import Constant, DType, InvalidModel
from ..ops.registry import FLOATS
from ..program.lowering.context import Lowering, Tensor
from . import registry
from . import tensor_types as names
from .operator import Attribute, AttributeKind, CustomOperator, Port, PortKind
from .tactics import Tactics, source_id
from .tensor_types import Alias, OnHost

P = ParamSpec("P")
R = TypeVar("R")

_SINGLE: Final[Mapping[object, AttributeKind]] = {
    bool: AttributeKind.INT,
    int: AttributeKind.INT,
    float: AttributeKind.FLOAT,
    str: AttributeKind.STRING,
    Constant: AttributeKind.TENSOR,
}
_SEQUENCES: Final[Mapping[object, AttributeKind]] = {
    int: AttributeKind.INTS,
    float: AttributeKind.FLOATS,
    str: AttributeKind.STRINGS,
}


class Op(Generic[P, R]):
    """An operator in the short form; calling it calls the author's function.

    ``operator`` is the record that is registered. `autotune` adds tactics.
    """

    def __init__(self, function: Callable[P, R], operator: CustomOperator, tactics: Tactics) -> None:
        self.function = function
        self.operator = operator
        self._tactics = tactics

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def autotune(
        self, tactics: Callable[..., Sequence[Any]] | None = None, *, timing_id: str = ""
    ) -> Callable[..., Any]:
        """Let the function ``tactics`` list the tactics of a node, the default one first. Also a decorator.

        ``tactics`` gets the arguments of the operator's function. The operator's function gets the chosen tactic (a
        block size, a memory format, a kernel) in the keyword-only parameter ``tactic``. Sessions with the option
        ``autotune`` measure the tactics. ``timing_id`` is a part of the key in the timing cache; default: a hash of
        the source of these two functions, so that changed functions are measured again.

        Raises TypeError if the function has no parameter ``tactic``.
        """
        if tactics is None:
            return lambda given: self.autotune(given, timing_id=timing_id)
        if not self._tactics.takes_tactic:
            raise TypeError(
                f"{self.operator.label}: autotune passes the tactic to the operator's function. Give the function a "
                "keyword-only parameter 'tactic'"
            )
        self._tactics.candidates = tactics
        self._tactics.timing_id = timing_id or source_id(self.function, tactics)
        return tactics

    def register(self) -> None:
        """Register the operator. Raises ValueError as `registry.register`."""
        self.operator = registry.register(self.operator)

    def unregister(self) -> None:
        """Unregister the operator; existing sessions keep it. Raises LookupError if it is not registered."""
        registry.unregister(self.operator)


def op(
    name: str,
    version: int = 1,
    *,
    types: Mapping[str, Set[DType]] | None = None,
    outputs: Sequence[str] = (),
    priority: int = 0,
    register: bool = True,
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Make an operator from a typed function, and register it.

    Args:
        name: "my.domain::CircularPad". A name of ONNX or of com.microsoft, such as "Relu" or "com.microsoft::Gelu",
            replaces the plugin's own operator if ``priority`` is above 0.
        version: the first version of the domain with this definition.
        types: the element types of each constraint; all floats for a constraint that is not named.
        outputs: names of the results, for messages.
        priority: see `CustomOperator`.
        register: whether to register the operator now; otherwise call `Op.register`.

    Raises:
        TypeError: an operator cannot have this signature.
        ValueError: a name or a version is invalid, or the operator is registered already.

    Examples:
        >>> from ort_cuda_plugin.custom import Lowering, T, elementwise, scalar
        >>> @ort_cuda_plugin.op("my.domain::Swish")
        ... def swish(ctx: Lowering, x: T, *, beta: float = 1.0) -> T:
        ...     return elementwise(ctx, lambda a: a / (1.0 + scalar.exp(-beta * a)), x)
    """
    domain, separator, simple = name.rpartition("::")
    domain = "" if domain == "ai.onnx" or not separator else domain

    def make(function: Callable[P, R]) -> Op[P, R]:
        schema = _Schema(name, function, types or {}, outputs)
        tactics = Tactics(f"{name}-{version}", schema.has_tactic)
        operator = CustomOperator(
            simple,
            domain,
            version,
            tuple(schema.inputs),
            tuple(schema.outputs),
            tuple(schema.attributes),
            tactics.around(_call(function, schema)),
            priority,
            getattr(function, "__module__", ""),
            getattr(function, "__qualname__", ""),
        )
        made = Op(function, operator, tactics)
        if register:
            made.register()
        return made

    return make


class _Schema:
    """The operator schema that the signature of an author's function describes."""

    def __init__(
        self,
        operator: str,
        function: Callable[..., Any],
        types: Mapping[str, Set[DType]],
        outputs: Sequence[str],
    ) -> None:
        self._operator, self._types = operator, types
        if not inspect.isroutine(function):
            raise TypeError(f"{operator}: the decorator op needs a function, got {function!r}")
        self._hints = _hints(operator, function)
        all_parameters = list(inspect.signature(function).parameters.values())
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        first = all_parameters[0] if all_parameters else None
        if first is None or first.kind not in positional or self._hints.get(first.name, Lowering) is not Lowering:
            given = "none" if first is None else f"`{first}`"
            raise TypeError(f"{operator}: first parameter: got {given}, expected the context, as in `ctx: Lowering`")
        parameters = all_parameters[1:]
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            raise TypeError(
                f"{operator}: **{parameters[-1].name} is not allowed: declare each attribute as a parameter after *"
            )
        self.has_tactic = any(p.name == "tactic" and p.kind is p.KEYWORD_ONLY for p in parameters)
        self.inputs = [self._input(p) for p in parameters if p.kind != p.KEYWORD_ONLY]
        self.attributes = [self._attribute(p) for p in parameters if p.kind == p.KEYWORD_ONLY and p.name != "tactic"]
        self.outputs = self._results(outputs)
        constraints = {port.constraint for port in (*self.inputs, *self.outputs)}
        for name, allowed in types.items():
            if name not in constraints:
                raise TypeError(f"{operator}: types has {name!r}, but no input or output is annotated with {name!r}")
            if not all(isinstance(dtype, DType) for dtype in allowed):
                raise TypeError(
                    f"{operator}: types[{name!r}] = {allowed!r}: expected element types such as DType.FLOAT32"
                )

    @property
    def num_fixed(self) -> int:
        """Return the number of declared inputs that are not variadic."""
        return sum(port.kind is not PortKind.VARIADIC for port in self.inputs)

    def _input(self, parameter: inspect.Parameter) -> Port:
        hint, optional = _without_none(self._hints.get(parameter.name))
        kind = PortKind.OPTIONAL if optional or parameter.default is None else PortKind.REQUIRED
        if parameter.kind is parameter.VAR_POSITIONAL:
            kind = PortKind.VARIADIC
        return self._port(parameter.name, hint, kind)

    def _port(self, name: str, hint: Any, kind: PortKind = PortKind.REQUIRED) -> Port:
        if hint is Tensor:
            hint = names.T
        if get_origin(hint) is not typing.Annotated or get_args(hint)[0] is not Tensor:
            raise TypeError(
                f"{self._operator}: {name!r} is annotated with {hint!r}, which is not a tensor type. Annotate it with "
                "Tensor, or with a name such as T or Float32 of ort_cuda_plugin.custom"
            )
        constraint, allowed, on_host, alias = "", FLOATS, False, None
        for mark in get_args(hint)[1:]:
            if isinstance(mark, str):
                constraint, allowed = mark, frozenset(self._types.get(mark, FLOATS))
            elif isinstance(mark, DType):
                allowed = frozenset({mark})
            elif isinstance(mark, Alias):
                alias = next((i for i, port in enumerate(self.inputs) if port.name == mark.name), None)
                if alias is None:
                    raise TypeError(
                        f"{self._operator}: {name!r} is declared as an alias of {mark.name!r}, expected the name of an "
                        "input"
                    )
            on_host = on_host or isinstance(mark, OnHost)
        return Port(name, allowed, constraint, kind, on_host=on_host, alias=alias)

    def _attribute(self, parameter: inspect.Parameter) -> Attribute:
        hint, optional = _without_none(self._hints.get(parameter.name))
        given = parameter.default
        default, optional = (None, optional) if given is parameter.empty else (given, optional or given is None)
        elements = get_args(hint)
        attribute = None
        if hint in _SINGLE:
            attribute = Attribute(parameter.name, _SINGLE[hint], default, optional, hint is bool)
        elif get_origin(hint) in (tuple, list, Sequence) and elements and elements[0] in _SEQUENCES:
            default = tuple(default) if isinstance(default, list) else default
            attribute = Attribute(parameter.name, _SEQUENCES[elements[0]], default, optional)
        if attribute is not None:
            try:
                return attribute if default is None else replace(attribute, default=attribute.checked(default, "its"))
            except InvalidModel as error:
                raise TypeError(f"{self._operator}: the default of {error.reason.removeprefix('its: ')}") from error
        raise TypeError(
            f"{self._operator}: attribute {parameter.name!r} is annotated with {hint!r}, expected int, float, bool, "
            "str, Constant, or a tuple, list or Sequence of int, float or str"
        )

    def _results(self, outputs: Sequence[str]) -> list[Port]:
        hint = self._hints.get("return")
        hints = list(get_args(hint)) if get_origin(hint) is tuple else [hint]
        labels = list(outputs) or (["y"] if len(hints) == 1 else [f"y{number}" for number in range(len(hints))])
        if len(labels) != len(hints):
            raise TypeError(
                f"{self._operator}: outputs has {len(labels)} names, expected {len(hints)}, as many as the function's "
                "return annotation has tensors"
            )
        pairs = [(label, *_without_none(each)) for label, each in zip(labels, hints, strict=True)]
        return [
            self._port(label, each, PortKind.OPTIONAL if optional else PortKind.REQUIRED)
            for label, each, optional in pairs
        ]


def _hints(operator: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the function's annotations as objects.

    Names imported only for type checkers must be those of this package.
    """
    known = {name: getattr(names, name) for name in dir(names) if not name.startswith("_")}
    known |= {"Lowering": Lowering, "Tensor": Tensor, "Constant": Constant, "Sequence": Sequence}
    try:
        return typing.get_type_hints(function, {**known, **_namespace(function)}, include_extras=True)
    except NameError as error:
        raise TypeError(f"{operator}: an annotation cannot be read: {error}") from error


def _namespace(function: Callable[..., Any]) -> dict[str, Any]:
    return dict(getattr(function, "__globals__", {}))


def _without_none(hint: Any) -> tuple[Any, bool]:
    """Return the annotation without ``None``, and whether ``None`` was a part of it."""
    if get_origin(hint) in (typing.Union, types.UnionType):
        others = [each for each in get_args(hint) if each is not type(None)]
        if len(others) == 1:
            return others[0], len(others) < len(get_args(hint))
    return hint, False


def _call(function: Callable[..., Any], schema: _Schema) -> Callable[..., Any]:
    """Wrap the author's function in one with the signature of `CustomOperator.function`; omitted inputs become None."""

    def call(ctx: Lowering, inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], **tactic: Any) -> Any:
        missing = max(0, schema.num_fixed - len(inputs))
        result = function(ctx, *inputs, *[None] * missing, **attributes, **tactic)
        return result if isinstance(result, tuple | list) else (result,)

    return call
