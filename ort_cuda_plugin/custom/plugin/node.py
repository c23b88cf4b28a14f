"""Runs a plugin for a node: asks it for the properties of a plan, and records the work that it enqueues."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from ...kernels.elementwise.index_map import IndexMap, gather_map
from ...model.ir import AttrValue, DeclinedLayout, DType, Node
from ...program.expressions import scalar as s
from ...program.expressions.scalar import Scalar
from ...program.expressions.symbolic import Dim, Expr, bounds, ceildiv, hint, le, logical_and
from ...program.lowering.context import Lowering, Tensor
from ...program.lowering.views import permute
from ...program.steps.trace import Launch
from ..tactics import choose_tactic
from .calls import PluginFailure, attached, called, each_run
from .descriptors import (
    DynamicPluginTensorDesc,
    ExprBuilder,
    PluginTensorDesc,
    Scope,
    SizeTensor,
    TensorFormat,
    dim_of,
    packed_channels,
    why_not,
)
from .fields import PluginFieldCollection, fields_of
from .interfaces import CapabilityType, Phase, Plugin, PluginBuild, PluginCore, PluginCreator, PluginRuntime
from .streams import RecordedStream, RecordedTensor

T = TypeVar("T")
_MOST = 2**40
"""Upper bound of a size without a declared bound."""
_LAST = {4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}
_FIRST = {4: (0, 3, 1, 2), 5: (0, 4, 1, 2, 3)}
Combination = tuple[TensorFormat, ...]


class PluginNodes:
    """The nodes of a creator. A plugin is created once for a node, and cloned for each plan."""

    def __init__(self, creator: PluginCreator) -> None:
        self._creator = creator
        self._plugins: WeakKeyDictionary[Node, Plugin] = WeakKeyDictionary()
        self.label = f"plugin {creator.get_plugin_name()}-{creator.get_plugin_version()}"

    def lower(
        self, ctx: Lowering, inputs: Sequence[Tensor | None], attributes: Mapping[str, AttrValue]
    ) -> list[Tensor]:
        """Return the node's outputs.

        Raises InvalidModel, Unsupported or PluginFailure, which name plugin, method and values.
        """
        plugin = self._clone(ctx, attributes)
        return _Plan(self._creator, self.label, plugin, ctx, inputs).outputs()

    def _clone(self, ctx: Lowering, attributes: Mapping[str, AttrValue]) -> Plugin:
        node = ctx.node
        plugin = self._plugins.get(node) if node is not None else None
        if plugin is None:
            plugin = self._create("" if node is None else node.name, attributes)
            if node is not None:
                self._plugins[node] = plugin
        return cloned(self.label, plugin)

    def _create(self, name: str, attributes: Mapping[str, AttrValue]) -> Plugin:
        creator = self._creator
        wanted = called(self.label, "get_field_names", creator.get_field_names)
        return create(creator, self.label, name, fields_of(wanted, attributes, self.label), Phase.BUILD)


def create(creator: PluginCreator, label: str, name: str, fields: PluginFieldCollection, phase: Phase) -> Plugin:
    """Create a plugin with the capabilities of its phase and its creator's name. Raises PluginFailure, InvalidModel."""
    subject = f"create_plugin with {fields!r}"
    plugin: Plugin | None = called(label, subject, creator.create_plugin, name, fields, phase)
    if plugin is None:
        raise PluginFailure(f"{label}: {subject} returned no plugin")
    needed = [CapabilityType.CORE, CapabilityType.RUNTIME, *([CapabilityType.BUILD] if phase is Phase.BUILD else [])]
    parts = {kind: capability(plugin, label, kind) for kind in needed}
    core: PluginCore = parts[CapabilityType.CORE]
    for what in ("name", "version", "namespace"):
        own, wanted = (getattr(who, f"get_plugin_{what}")() for who in (core, creator))
        if own != wanted:
            raise PluginFailure(f"{label}: get_plugin_{what} of the plugin is {own!r}, that of its creator {wanted!r}")
    return plugin


def cloned(label: str, plugin: Plugin) -> Plugin:
    """Clone the plugin. Raises PluginFailure if that fails."""
    clone: Plugin | None = called(label, "clone", plugin.clone)
    if clone is None:
        raise PluginFailure(f"{label}: clone returned no plugin")
    return clone


def capability(plugin: Plugin, label: str, kind: CapabilityType) -> Any:
    """Return a part of the plugin. Raises PluginFailure if it lacks it."""
    part = called(label, f"get_capability_interface({kind.name})", plugin.get_capability_interface, kind)
    classes = {
        CapabilityType.CORE: PluginCore,
        CapabilityType.BUILD: PluginBuild,
        CapabilityType.RUNTIME: PluginRuntime,
    }
    if not isinstance(part, classes[kind]):
        raise PluginFailure(f"{label}: get_capability_interface returned no {kind.name} capability")
    return part


@dataclass(frozen=True)
class _Memory:
    """Memory of an output: the tensor that the plugin writes, and the conversion to the node's output."""

    tensor: Tensor
    shape: tuple[Any, ...]
    """The shape, with a `SizeTensor` for each size that a Run computes."""


class _Plan:
    """One plan of a node."""

    def __init__(
        self, creator: PluginCreator, label: str, plugin: Plugin, ctx: Lowering, inputs: Sequence[Tensor | None]
    ) -> None:
        self._creator, self._label, self._plugin, self._ctx, self._inputs = creator, label, plugin, ctx, inputs
        self._tactic: int | None = None
        self._build: PluginBuild = capability(plugin, label, CapabilityType.BUILD)
        self._scope = Scope(ctx.guard)

    def _ask(self, method: str, function: Callable[..., T], *arguments: Any, about: str = "") -> T:
        subject = f"{method} {about}".strip()
        return called(self._label, subject, function, *arguments)

    def _listed(self, method: str, function: Callable[..., object], *arguments: Any, about: str = "") -> list[Any]:
        """Call a method that returns a list with one entry for each output."""
        given = self._ask(method, function, *arguments, about=about)
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise PluginFailure(
                f"{self._label}: {method} returned {given!r}, expected a list with one entry for each output"
            )
        return list(given)

    def _check(self, method: str, function: Callable[..., Any], *arguments: Any, about: str = "") -> bool:
        """Call a method that may refuse sizes. Return False if it refused guessed sizes."""
        try:
            self._ask(method, function, *arguments, about=about)
        except PluginFailure:
            if self._ctx.is_guess and self._scope.asked:
                return False
            raise
        return True

    def outputs(self, way: str = "") -> list[Tensor]:
        """Return the outputs by the fastest tactic, or by the one with this name."""
        build = self._build
        count = self._ask("get_nb_outputs", build.get_nb_outputs)
        if not isinstance(count, int) or count < 1:
            raise PluginFailure(f"{self._label}: get_nb_outputs returned {count!r}, expected a number from 1")
        types = self._types(count)
        shapes = self._shapes(types)
        aliases = self._aliases(types, shapes)
        note = self._ask("get_metadata_string", build.get_metadata_string)
        if not isinstance(note, str):
            raise PluginFailure(f"{self._label}: get_metadata_string returned {note!r}, expected text")
        if note and self._ctx.node is not None:
            self._ctx.notes[self._ctx.node] = note
        combinations = self._combinations(types, shapes)
        formats = combinations[0]
        if way or self._ctx.tuner is not None:
            formats, self._tactic, why = self._way(combinations, way)
            note = f"{note}; {why}" if note else why
        before = len(self._ctx.trace.steps)
        results = self._compute(formats, types, shapes, aliases)
        for step in self._ctx.trace.steps[before:]:
            if isinstance(step, Launch):
                step.note = note
        return results

    def _way(self, combinations: Sequence[Combination], way: str) -> tuple[Combination, int, str]:
        """Return formats, tactic and reason: the fastest combination, or the one with this name.

        Nothing is measured unless the plugin returns a timing-cache id.
        """
        ways = {
            f"tactic {tactic}, {'/'.join(format.name for format in formats)}": (formats, tactic)
            for tactic in self._tactics()
            for formats in combinations
        }
        if way:
            return *ways[way], way
        problem = self._ask("get_timing_cache_id", self._build.get_timing_cache_id)
        is_recorded = capability(self._plugin, self._label, CapabilityType.RUNTIME).enqueue_is_recorded
        if problem is None or not is_recorded:
            name = next(iter(ways))
            why = "it has no get_timing_cache_id" if is_recorded else "what each Run calls is not measured"
            return *ways[name], f"{name}: {why}"
        chosen = choose_tactic(self._ctx, f"{self._label} {problem}", self._inputs, list(ways), self._by)
        return *ways[chosen.name], f"{chosen.name}: {chosen.why}"

    def _by(self, ctx: Lowering, inputs: Sequence[Tensor | None], way: str) -> None:
        """Record the plugin's work by that tactic in another context."""
        _Plan(self._creator, self._label, cloned(self._label, self._plugin), ctx, inputs).outputs(way)

    # ---- inputs and outputs ----

    def _types(self, count: int) -> list[DType]:
        given = [None if x is None else x.dtype for x in self._inputs]
        types = self._listed("get_output_data_types", self._build.get_output_data_types, given)
        if len(types) != count or not all(isinstance(dtype, DType) for dtype in types):
            raise PluginFailure(f"{self._label}: get_output_data_types returned {types!r} for {count} outputs")
        return types

    def _dims(self, shape: Sequence[Dim]) -> tuple[Any, ...]:
        return tuple(map(self._scope.wrap, shape))

    def _shapes(self, types: Sequence[DType]) -> list[tuple[Any, ...]]:
        """Return the shapes of outputs, with sizes and `SizeTensor`."""
        ctx = self._ctx
        inputs = [None if x is None else self._dims(x.shape) for x in self._inputs]
        on_host = [port.on_host for port in self._creator.inputs]
        contents = [
            None if x is None else self._dims(ctx.host_values(x, f"input {number} of {self._label}"))
            for number, x in enumerate(self._inputs)
            if number < len(on_host) and on_host[number]
        ]
        builder = ExprBuilder(self._scope)
        about = f"for inputs of {_shown(inputs)}"
        given = self._listed("get_output_shapes", self._build.get_output_shapes, inputs, contents, builder, about=about)
        if not all(isinstance(shape, Sequence) for shape in given):
            raise PluginFailure(
                f"{self._label}: get_output_shapes returned {given!r}, expected a shape for each output"
            )
        shapes = [tuple(shape) for shape in given]
        if len(shapes) != len(types):
            raise PluginFailure(
                f"{self._label}: get_output_shapes returned {len(shapes)} shapes for {len(types)} outputs"
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
            raise PluginFailure(f"{self._label}: get_output_shapes returned {size!r} for a size") from error
        self._ctx.require(le(0, dim), f"{self._label}: get_output_shapes gave a size that is less than 0")

    def _check_size_tensor(self, size: SizeTensor, types: Sequence[DType], shapes: Sequence[tuple[Any, ...]]) -> None:
        number = size.output
        if not 0 <= number < len(types) or shapes[number] != () or types[number] not in (DType.INT32, DType.INT64):
            raise PluginFailure(
                f"{self._label}: declare_size_tensor names output {number}, which is not a scalar of type INT32 or "
                "INT64"
            )

    def _aliases(self, types: Sequence[DType], shapes: Sequence[tuple[Any, ...]]) -> dict[int, int]:
        """Return for each output the input whose memory it shares."""
        found: dict[int, int] = {}
        for output, (dtype, shape) in enumerate(zip(types, shapes, strict=True)):
            number = self._ask("get_aliased_input", self._build.get_aliased_input, output, about=f"of output {output}")
            if not isinstance(number, int):
                raise PluginFailure(
                    f"{self._label}: get_aliased_input({output}) returned {number!r}, expected the number of an input"
                )
            if number == -1:
                continue
            x = self._inputs[number] if 0 <= number < len(self._inputs) else None
            if x is None or number in found.values():
                raise PluginFailure(f"{self._label}: get_aliased_input({output}) = {number}, which is not a free input")
            sizes = tuple(size if isinstance(size, SizeTensor) else dim_of(size) for size in shape)
            if x.dtype is not dtype or x.shape != sizes:
                raise PluginFailure(
                    f"{self._label}: output {output} is an alias of input {number} with another type or shape"
                )
            found[output] = number
        return found

    # ---- formats ----

    def _descs(
        self, types: Sequence[DType], shapes: Sequence[tuple[Any, ...]], formats: Combination, wild: Any
    ) -> tuple[list[PluginTensorDesc | None], list[PluginTensorDesc]]:
        """Return descriptions of inputs and outputs. ``wild`` stands for a size that a Run computes."""
        formats = (*formats, *[TensorFormat.LINEAR] * (len(self._inputs) + len(types) - len(formats)))
        sizes = [tuple(wild if isinstance(size, SizeTensor) else size for size in shape) for shape in shapes]
        inputs = [
            None if x is None else PluginTensorDesc(self._dims(x.shape), x.dtype, format)
            for x, format in zip(self._inputs, formats, strict=False)
        ]
        return inputs, list(map(PluginTensorDesc, sizes, types, formats[len(inputs) :]))

    def _combinations(self, types: Sequence[DType], shapes: Sequence[tuple[Any, ...]]) -> list[Combination]:
        """Yield the combinations that the plugin supports and the host can provide, in trial order: LINEAR first."""
        inputs, outputs = self._descs(types, shapes, (), -1)
        all_descs = [*inputs, *outputs]
        limit = self._ask("get_format_combination_limit", self._build.get_format_combination_limit)
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
                if self._ask(
                    "supports_format_combination",
                    self._build.supports_format_combination,
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
            reason = f"{self._label}: supports_format_combination takes no{what} for tensor {pos} of the node"
            sizes = [tuple(None if isinstance(x, SizeTensor) else dim_of(x) for x in shape) for shape in shapes]
            raise DeclinedLayout(reason, list(zip(types, sizes, strict=True)))
        return found

    # ---- memory ----

    def _placed(self, x: Tensor, format: TensorFormat) -> Tensor:
        """Return a contiguous tensor in the format, with its sizes in memory order."""
        if packed_channels(format) > 1:
            return pack_channels(self._ctx, x, packed_channels(format))
        return self._ctx.contiguous(x if format is TensorFormat.LINEAR else permute(self._ctx, x, _LAST[x.rank]))

    def _compute(
        self,
        formats: Combination,
        types: Sequence[DType],
        shapes: Sequence[tuple[Any, ...]],
        aliases: Mapping[int, int],
    ) -> list[Tensor]:
        ctx = self._ctx
        placed = {n: self._placed(x, formats[n]) for n, x in enumerate(self._inputs) if x is not None}
        of_outputs = formats[len(self._inputs) :]
        memories: list[_Memory] = []
        for number, (dtype, shape, format) in enumerate(zip(types, shapes, of_outputs, strict=True)):
            if number in aliases:
                placed[aliases[number]] = shared = self._shared(placed[aliases[number]])
                memories.append(_Memory(shared, shape))
                continue
            full = tuple(size.upper if isinstance(size, SizeTensor) else dim_of(size) for size in shape)
            if (vector := packed_channels(format)) > 1:
                full = (full[0], ceildiv(full[1], vector), *full[2:], vector)
            elif format is not TensorFormat.LINEAR:
                full = tuple(full[axis] for axis in _LAST[len(full)])
            memories.append(_Memory(ctx.empty(full, dtype), shape))
        self._enqueue(formats, types, shapes, [placed.get(n) for n in range(len(self._inputs))], memories)
        pairs = zip(memories, of_outputs, strict=True)
        return [self._result(memory, format, memories) for memory, format in pairs]

    def _shared(self, x: Tensor) -> Tensor:
        """Return memory that is input and output. An initializer's stays with the node from Run to Run."""
        ctx = self._ctx
        if x.is_constant:
            contents = x.constant
            assert contents is not None
            state = ctx.state(lambda: np.array(contents))
            return Tensor(x.dtype, x.shape, state.buffer)
        copied = ctx.empty(x.shape, x.dtype)
        ctx.copy(copied, x)  # no copy if the application bound both to the same memory
        return copied

    def _result(self, memory: _Memory, format: TensorFormat, memories: Sequence[_Memory]) -> Tensor:
        ctx, x = self._ctx, memory.tensor
        if any(isinstance(size, SizeTensor) for size in memory.shape):
            dims = tuple(
                self._found(size, memories) if isinstance(size, SizeTensor) else dim_of(size) for size in memory.shape
            )
            if format is not TensorFormat.LINEAR:
                dims = tuple(dims[axis] for axis in _LAST[len(dims)])
            x = ctx.view(x, dims)
        if packed_channels(format) > 1:
            return unpack_channels(ctx, x, dim_of(memory.shape[1]))
        return x if format is TensorFormat.LINEAR else permute(ctx, x, _FIRST[x.rank])

    def _found(self, size: SizeTensor, memories: Sequence[_Memory]) -> Dim:
        """Return a size that the Run computed. A size beyond its bound is an error of the Run."""
        what = f"size tensor {size.output} of {self._label}"
        ctx = self._ctx
        (found,) = ctx.read_back(memories[size.output].tensor, what, likely=hint(size.opt))
        within = logical_and(le(0, found), le(found, size.upper))
        ctx.require(within, f"{what} is not between 0 and its upper bound")
        return found

    # ---- work ----

    def _enqueue(
        self,
        formats: Combination,
        types: Sequence[DType],
        shapes: Sequence[tuple[Any, ...]],
        inputs: Sequence[Tensor | None],
        memories: Sequence[_Memory],
    ) -> None:
        build, ctx = self._build, self._ctx
        given, results = self._descs(types, shapes, formats, -1)
        ranges = [[desc and dynamic(desc) for desc in descs] for descs in (given, results)]
        about = f"for inputs of {_shown(desc and desc.dims for desc in given)}"
        if not self._check("configure_plugin", build.configure_plugin, *ranges, about=about):
            return
        sized = [[desc and dynamic(desc, keep=True) for desc in descs] for descs in (given, results)]
        nbytes = self._ask("get_workspace_size", build.get_workspace_size, *sized, about=about)
        try:
            size = dim_of(nbytes)
        except TypeError as error:
            raise PluginFailure(f"{self._label}: get_workspace_size returned {nbytes!r}") from error
        ctx.require(le(0, size), f"{self._label}: get_workspace_size gave less than 0 bytes")
        workspace = None if size == 0 else ctx.empty((size,), DType.UINT8)
        tactics = [self._tactic] if self._tactic is not None else self._tactics()
        runtime: PluginRuntime = capability(self._plugin, self._label, CapabilityType.RUNTIME)
        writes = [memory.tensor for memory in memories]
        if workspace is not None:
            writes.append(workspace)
        if not runtime.enqueue_is_recorded:
            each_run(ctx, self._creator, self._label, self._plugin, tactics[0], [*given], [*results], inputs, writes)
            return
        self._record(tactics[0], given, results, inputs, memories, workspace, writes)

    def _tactics(self) -> list[int]:
        build = self._build
        count = self._ask("get_nb_tactics", build.get_nb_tactics)
        found = list(self._ask("get_valid_tactics", build.get_valid_tactics))
        if len(found) != count:
            raise PluginFailure(f"{self._label}: get_nb_tactics is {count}, and get_valid_tactics returned {found!r}")
        if any(not isinstance(tactic, int) or tactic < 1 for tactic in found) or len(set(found)) != len(found):
            raise PluginFailure(
                f"{self._label}: get_valid_tactics returned {found!r}: they are different numbers from 1"
            )
        return found or [0]

    def _record(
        self,
        tactic: int,
        given: Sequence[PluginTensorDesc | None],
        results: Sequence[PluginTensorDesc],
        inputs: Sequence[Tensor | None],
        memories: Sequence[_Memory],
        workspace: Tensor | None,
        writes: Sequence[Tensor],
    ) -> None:
        ctx, label = self._ctx, self._label
        _, runtime = attached(label, self._plugin, is_emulated=not ctx.device.runs_cubins)
        self._ask("set_tactic", runtime.set_tactic, tactic, about=str(tactic))
        about = f"for inputs of {_shown(desc and desc.dims for desc in given)}"
        if not self._check("on_shape_change", runtime.on_shape_change, given, results, about=about):
            return

        def handle(x: Tensor | None) -> RecordedTensor | None:
            return None if x is None else RecordedTensor(x, self._scope)

        tensors = [handle(x) for x in inputs]
        targets = [handle(memory.tensor) for memory in memories]
        stream = RecordedStream(ctx, writes)
        arguments = (given, results, tensors, targets, handle(workspace), stream)
        self._check("enqueue", runtime.enqueue, *arguments, about=about)


def pack_channels(ctx: Lowering, x: Tensor, vector: int) -> Tensor:
    """Convert [N, C, ...] to [N, ceil(C / vector), ..., vector], with 0 behind the last channel."""

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        channel = c[1] * vector + c[-1]
        source = maps.source(x)
        return source.at([c[0], channel, *c[2:-1]], channel < source.dim(1))

    return gather_map(ctx, (x.shape[0], ceildiv(x.shape[1], vector), *x.shape[2:], vector), x.dtype, element)


def unpack_channels(ctx: Lowering, x: Tensor, channels: Dim) -> Tensor:
    """Convert back from `pack_channels`."""
    vector = x.shape[-1]
    assert isinstance(vector, int)

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        return maps.source(x).at([c[0], s.trunc_divide(c[1], vector), *c[2:], s.trunc_modulo(c[1], vector)])

    return gather_map(ctx, (x.shape[0], channels, *x.shape[2:-1]), x.dtype, element)


def _dim_or_wild(size: Any) -> Dim:
    return -1 if isinstance(size, SizeTensor) else dim_of(size)


def dynamic(desc: PluginTensorDesc, *, keep: bool = False) -> DynamicPluginTensorDesc:
    """Return descriptions with ranges. Unknown sizes are -1, unless ``keep``."""
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


def _shown(shapes: Any) -> str:
    shown = ["nothing" if shape is None else f"[{', '.join(map(repr, shape))}]" for shape in shapes]
    return ", ".join(shown) or "no inputs"
