"""Queries an application's plugin object about a node, and checks its output types, shapes, formats and tactics."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ...model.ir import DeclinedLayout, DType
from ...program.expressions.symbolic import Dim, Expr, bounds, hint, le
from ...program.lowering.context import Lowering, Tensor
from .calls import PluginFailure, called
from .descriptors import (
    DynamicPluginTensorDesc,
    ExprBuilder,
    PluginTensorDesc,
    Scope,
    SizeTensor,
    TensorFormat,
    dim_of,
    why_not,
)
from .interfaces import CapabilityType, Plugin, PluginBuild, PluginCore, PluginCreator, PluginRuntime

T = TypeVar("T")
_MOST = 2**40
"""Upper bound of a size without a declared bound."""
Combination = tuple[TensorFormat, ...]


class Answers:
    """Calls an application's plugin object for one plan of a node. An impossible return value raises PluginFailure.

    ``label`` names the application's plugin in messages. ``scope`` wraps sizes for the application's code, as `Size`.
    """

    def __init__(
        self, creator: PluginCreator, label: str, plugin: Plugin, ctx: Lowering, inputs: Sequence[Tensor | None]
    ) -> None:
        self._creator, self.label, self._ctx, self._inputs = creator, label, ctx, inputs
        self.build: PluginBuild = capability(plugin, label, CapabilityType.BUILD)
        self.scope = Scope(ctx.guard)

    def ask(self, method: str, function: Callable[..., T], *arguments: Any, about: str = "") -> T:
        subject = f"{method} {about}".strip()
        return called(self.label, subject, function, *arguments)

    def _listed(self, method: str, function: Callable[..., object], *arguments: Any, about: str = "") -> list[Any]:
        """Call a method of the application's plugin that returns a list with one entry for each output."""
        given = self.ask(method, function, *arguments, about=about)
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise PluginFailure(
                f"{self.label}: {method} returned {given!r}, expected a list with one entry for each output"
            )
        return list(given)

    def check(self, method: str, function: Callable[..., Any], *arguments: Any, about: str = "") -> bool:
        """Call a method of the application's plugin. Return False if it fails for sizes that the compiler guessed.

        Before the first Run, symbolic dimensions have guessed sizes; the plugin may reject them, and accept real ones.
        """
        try:
            self.ask(method, function, *arguments, about=about)
        except PluginFailure:
            if self._ctx.is_guess and self.scope.asked:
                return False
            raise
        return True

    def count(self) -> int:
        """Return the number of outputs of the application's plugin."""
        count = self.ask("get_nb_outputs", self.build.get_nb_outputs)
        if not isinstance(count, int) or count < 1:
            raise PluginFailure(f"{self.label}: get_nb_outputs returned {count!r}, expected an integer of at least 1")
        return count

    def note(self) -> str:
        note = self.ask("get_metadata_string", self.build.get_metadata_string)
        if not isinstance(note, str):
            raise PluginFailure(f"{self.label}: get_metadata_string returned {note!r}, expected text")
        return note

    def types(self, count: int) -> list[DType]:
        given = [None if x is None else x.dtype for x in self._inputs]
        types = self._listed("get_output_data_types", self.build.get_output_data_types, given)
        if len(types) != count or not all(isinstance(dtype, DType) for dtype in types):
            raise PluginFailure(
                f"{self.label}: get_output_data_types returned {types!r}, expected a DType for each of {count} outputs"
            )
        return types

    def _dims(self, shape: Sequence[Dim]) -> tuple[Any, ...]:
        return tuple(map(self.scope.wrap, shape))

    def shapes(self, types: Sequence[DType]) -> list[tuple[Any, ...]]:
        """Return the shapes of outputs. A dimension is a size, or a `SizeTensor` for a size that a Run computes."""
        ctx = self._ctx
        inputs = [None if x is None else self._dims(x.shape) for x in self._inputs]
        on_host = [port.on_host for port in self._creator.inputs]
        contents = [
            None if x is None else self._dims(ctx.host_values(x, f"input {number} of {self.label}"))
            for number, x in enumerate(self._inputs)
            if number < len(on_host) and on_host[number]
        ]
        builder = ExprBuilder(self.scope)
        about = f"for inputs of {shown(inputs)}"
        given = self._listed("get_output_shapes", self.build.get_output_shapes, inputs, contents, builder, about=about)
        if not all(isinstance(shape, Sequence) for shape in given):
            raise PluginFailure(f"{self.label}: get_output_shapes returned {given!r}, expected a shape for each output")
        shapes = [tuple(shape) for shape in given]
        if len(shapes) != len(types):
            raise PluginFailure(
                f"{self.label}: get_output_shapes returned {len(shapes)} shapes, expected one for each of {len(types)} "
                "outputs"
            )
        for shape in shapes:
            for size in shape:
                if isinstance(size, SizeTensor):
                    self._check_size_tensor(size, types, shapes)
                else:
                    self._checked_dim(size)
        return shapes

    def _checked_dim(self, size: Any) -> None:
        try:
            dim = dim_of(size)
        except TypeError as error:
            raise PluginFailure(
                f"{self.label}: get_output_shapes returned {size!r} for a size, expected an int or a Size"
            ) from error
        self._ctx.require(le(0, dim), f"{self.label}: get_output_shapes returned a negative size")

    def _check_size_tensor(self, size: SizeTensor, types: Sequence[DType], shapes: Sequence[tuple[Any, ...]]) -> None:
        number = size.output
        if not 0 <= number < len(types) or shapes[number] != () or types[number] not in (DType.INT32, DType.INT64):
            raise PluginFailure(
                f"{self.label}: declare_size_tensor names output {number}, expected the index of an output that is a "
                "scalar of type INT32 or INT64"
            )

    def aliases(self, types: Sequence[DType], shapes: Sequence[tuple[Any, ...]]) -> dict[int, int]:
        """Return the index of the input whose memory each output shares; outputs with own memory are left out."""
        found: dict[int, int] = {}
        for output, (dtype, shape) in enumerate(zip(types, shapes, strict=True)):
            number = self.ask("get_aliased_input", self.build.get_aliased_input, output, about=f"of output {output}")
            if not isinstance(number, int):
                raise PluginFailure(
                    f"{self.label}: get_aliased_input({output}) returned {number!r}, expected the index of an input, "
                    "or -1"
                )
            if number == -1:
                continue
            x = self._inputs[number] if 0 <= number < len(self._inputs) else None
            if x is None or number in found.values():
                raise PluginFailure(
                    f"{self.label}: get_aliased_input({output}) returned {number}, expected -1, or the index of an "
                    "input that the node has and that no earlier output is an alias of"
                )
            sizes = tuple(size if isinstance(size, SizeTensor) else dim_of(size) for size in shape)
            if x.dtype is not dtype or x.shape != sizes:
                raise PluginFailure(
                    f"{self.label}: output {output}, an alias of input {number}, is {dtype.name}{list(sizes)}, "
                    f"expected the input's {x.dtype.name}{list(x.shape)}"
                )
            found[output] = number
        return found

    def descs(
        self, types: Sequence[DType], shapes: Sequence[tuple[Any, ...]], formats: Combination, wild: Any
    ) -> tuple[list[PluginTensorDesc | None], list[PluginTensorDesc]]:
        """Return descriptions of the node's inputs and outputs, with ``wild`` in place of sizes that a Run computes."""
        formats = (*formats, *[TensorFormat.LINEAR] * (len(self._inputs) + len(types) - len(formats)))
        sizes = [tuple(wild if isinstance(size, SizeTensor) else size for size in shape) for shape in shapes]
        inputs = [
            None if x is None else PluginTensorDesc(self._dims(x.shape), x.dtype, format)
            for x, format in zip(self._inputs, formats, strict=False)
        ]
        return inputs, list(map(PluginTensorDesc, sizes, types, formats[len(inputs) :]))

    def combinations(self, types: Sequence[DType], shapes: Sequence[tuple[Any, ...]]) -> list[Combination]:
        """Return combinations of formats that the application's plugin supports, up to its limit; LINEAR first.

        Raises DeclinedLayout if it supports none.
        """
        inputs, outputs = self.descs(types, shapes, (), -1)
        all_descs = [*inputs, *outputs]
        limit = self.ask("get_format_combination_limit", self.build.get_format_combination_limit)
        refused: dict[int, list[str]] = {}

        def search(chosen: Combination) -> Iterator[Combination]:
            pos = len(chosen)
            if pos == len(all_descs):
                yield chosen
                return
            asked = all_descs[pos]
            if asked is None:
                yield from search((*chosen, TensorFormat.LINEAR))
                return
            for format in TensorFormat:
                if why_not(format, asked.type, tuple(map(_dim_or_wild, asked.dims))):
                    continue
                formats = (*chosen, format)
                described = [
                    desc and dynamic(replace(desc, format=kind))
                    for desc, kind in zip(all_descs, (*formats, *[TensorFormat.LINEAR] * len(all_descs)), strict=False)
                ]
                about = f"at {pos} for {asked.type.name}, {format.name}"
                if self.ask(
                    "supports_format_combination",
                    self.build.supports_format_combination,
                    pos,
                    described,
                    len(inputs),
                    about=about,
                ):
                    yield from search(formats)
                else:
                    refused.setdefault(pos, []).append(format.name)

        found = list(itertools.islice(search(()), max(1, limit)))
        if not found:
            pos = max(refused, default=0)
            desc = all_descs[pos] if all_descs else None
            what = "" if desc is None else f" {desc.type.name} in {', '.join(refused.get(pos, []))}"
            what = what or " format"
            reason = (
                f"{self.label}: supports_format_combination accepts no{what} for tensor {pos} of the node (inputs "
                "first, then outputs)"
            )
            sizes = [tuple(None if isinstance(x, SizeTensor) else dim_of(x) for x in shape) for shape in shapes]
            raise DeclinedLayout(reason, list(zip(types, sizes, strict=True)))
        return found

    def tactics(self) -> list[int]:
        build = self.build
        count = self.ask("get_nb_tactics", build.get_nb_tactics)
        found = list(self.ask("get_valid_tactics", build.get_valid_tactics))
        if len(found) != count:
            raise PluginFailure(
                f"{self.label}: get_valid_tactics returned {found!r}, expected {count} tactics, as get_nb_tactics says"
            )
        if any(not isinstance(tactic, int) or tactic < 1 for tactic in found) or len(set(found)) != len(found):
            raise PluginFailure(
                f"{self.label}: get_valid_tactics returned {found!r}, expected distinct integers of at least 1"
            )
        return found or [0]


def capability(plugin: Plugin, label: str, kind: CapabilityType) -> Any:
    """Return the capability object ``kind`` of an application's plugin. Raises PluginFailure if it has none."""
    part = called(label, f"get_capability_interface({kind.name})", plugin.get_capability_interface, kind)
    classes = {
        CapabilityType.CORE: PluginCore,
        CapabilityType.BUILD: PluginBuild,
        CapabilityType.RUNTIME: PluginRuntime,
    }
    if not isinstance(part, classes[kind]):
        raise PluginFailure(
            f"{label}: get_capability_interface({kind.name}) returned {type(part).__name__}, expected a "
            f"{classes[kind].__name__}"
        )
    return part


def _dim_or_wild(size: Any) -> Dim:
    return -1 if isinstance(size, SizeTensor) else dim_of(size)


def dynamic(desc: PluginTensorDesc, *, keep: bool = False) -> DynamicPluginTensorDesc:
    """Add the range of each size to a description. Unless ``keep``, ``desc.dims`` gets -1 for each unknown size."""
    low, now, high, dims = [], [], [], []
    for size in desc.dims:
        dim = dim_of(size)
        known = isinstance(dim, int)
        least, most = bounds(dim) if isinstance(dim, Expr) else (dim, dim)
        low.append(max(least or 0, 0) if dim != -1 else 0)
        high.append(_MOST if most is None or dim == -1 else most)
        now.append(hint(dim))
        dims.append(size if known or keep else -1)
    return DynamicPluginTensorDesc(replace(desc, dims=tuple(dims)), tuple(low), tuple(now), tuple(high))


def shown(shapes: Any) -> str:
    shown = ["nothing" if shape is None else f"[{', '.join(map(repr, shape))}]" for shape in shapes]
    return ", ".join(shown) or "no inputs"
