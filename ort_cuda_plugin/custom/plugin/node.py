"""Lowers a node through an application's plugin object, modeled on TensorRT's IPluginV3.

Queries the plugin for types, shapes and formats, and records the work that its ``enqueue`` launches.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ...kernels.elementwise.index_map import IndexMap, gather_map
from ...model.ir import AttrValue, DType, Node
from ...program.expressions import scalar as s
from ...program.expressions.scalar import Scalar
from ...program.expressions.symbolic import Dim, ceildiv, hint, le, logical_and
from ...program.lowering.context import Lowering, Tensor
from ...program.lowering.views import permute
from ...program.steps.trace import Launch
from ..report import report
from ..tactics import choose_tactic
from .answers import Answers, Combination, capability, dynamic, shown
from .calls import PluginFailure, attached, called, each_run
from .descriptors import (
    PluginTensorDesc,
    SizeTensor,
    TensorFormat,
    dim_of,
    packed_channels,
)
from .fields import PluginFieldCollection, fields_of
from .interfaces import CapabilityType, Phase, Plugin, PluginCore, PluginCreator, PluginRuntime
from .streams import RecordedStream, RecordedTensor

_LAST = {4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}
_FIRST = {4: (0, 3, 1, 2), 5: (0, 4, 1, 2, 3)}


class PluginNodes:
    """Lowers the nodes of the operator that a creator declares.

    The creator makes one plugin object for each node; each plan gets a clone of it.
    """

    def __init__(self, creator: PluginCreator) -> None:
        self._creator = creator
        self._plugins: WeakKeyDictionary[Node, Plugin] = WeakKeyDictionary()
        self.label = f"plugin {creator.get_plugin_name()}-{creator.get_plugin_version()}"

    def lower(
        self, ctx: Lowering, inputs: Sequence[Tensor | None], attributes: Mapping[str, AttrValue]
    ) -> list[Tensor]:
        """Return the node's outputs.

        Raises InvalidModel, Unsupported or PluginFailure, which name the application's plugin, the method and values.
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
    """Create a plugin object.

    Raises PluginFailure if the creator fails or returns None, if the object lacks a capability that ``phase`` needs, or
    if its name, version or namespace is not its creator's; InvalidModel if the creator raises it.
    """
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
            raise PluginFailure(
                f"{label}: get_plugin_{what} of the plugin returned {own!r}, expected its creator's {wanted!r}"
            )
    return plugin


def cloned(label: str, plugin: Plugin) -> Plugin:
    """Return a clone of the plugin. Raises PluginFailure if its ``clone`` fails or returns None."""
    clone: Plugin | None = called(label, "clone", plugin.clone)
    if clone is None:
        raise PluginFailure(f"{label}: clone returned no plugin")
    return clone


@dataclass(frozen=True)
class _Memory:
    """Memory of an output: the tensor that the application's plugin writes, and the shape of the node's output."""

    tensor: Tensor
    shape: tuple[Any, ...]
    """The shape, with a `SizeTensor` for each size that a Run computes."""


class _Plan:
    """Lowers a node for one plan."""

    def __init__(
        self, creator: PluginCreator, label: str, plugin: Plugin, ctx: Lowering, inputs: Sequence[Tensor | None]
    ) -> None:
        self._creator, self._label, self._plugin, self._ctx, self._inputs = creator, label, plugin, ctx, inputs
        self._tactic: int | None = None
        self._answers = Answers(creator, label, plugin, ctx, inputs)

    def outputs(self, way: str = "") -> list[Tensor]:
        """Return the outputs of the tactic and formats that ``way`` names.

        If ``way`` is "", they are the fastest ones if the session measures tactics, else the first ones.
        """
        answers = self._answers
        types = answers.types(answers.count())
        shapes = answers.shapes(types)
        aliases = answers.aliases(types, shapes)
        note = answers.note()
        if note and self._ctx.node is not None:
            self._ctx.notes[self._ctx.node] = note
        combinations = answers.combinations(types, shapes)
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
        """Return formats, tactic and reason: the fastest pair of formats and tactic, or the pair that ``way`` names.

        Pairs are measured only if the application's plugin returns a timing-cache id; else the first pair counts as
        fastest.
        """
        ways = {
            f"{tactic}, {'/'.join(format.name for format in formats)}": (formats, tactic)
            for tactic in self._answers.tactics()
            for formats in combinations
        }
        if way:
            return *ways[way], f"tactic {way}"
        problem = self._answers.ask("get_timing_cache_id", self._answers.build.get_timing_cache_id)
        is_recorded = capability(self._plugin, self._label, CapabilityType.RUNTIME).enqueue_is_recorded
        if problem is None or not is_recorded:
            name = next(iter(ways))
            why = (
                "not measured, since it has no get_timing_cache_id"
                if is_recorded
                else "not measured, since each Run calls enqueue"
            )
            if is_recorded and len(ways) > 1:
                warn_unmeasured(self._label)
            return *ways[name], f"tactic {name}: {why}"
        chosen = choose_tactic(self._ctx, f"{self._label} {problem}", self._inputs, list(ways), self._by)
        return *ways[chosen.name], f"tactic {chosen.name}: {chosen.why}"

    def _by(self, ctx: Lowering, inputs: Sequence[Tensor | None], way: str) -> None:
        """Record in ``ctx`` the work of a clone of the plugin, with the tactic and formats that ``way`` names."""
        _Plan(self._creator, self._label, cloned(self._label, self._plugin), ctx, inputs).outputs(way)

    # ---- memory of inputs and outputs ----

    def _placed(self, x: Tensor, format: TensorFormat) -> Tensor:
        """Return x as a contiguous tensor in ``format``; its shape is in memory order."""
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
        """Return memory that is both input ``x`` and an output.

        If ``x`` is an initializer, the node keeps this memory and its contents from Run to Run; else the memory is a
        copy of ``x``.
        """
        ctx = self._ctx
        if x.is_constant:
            contents = x.constant
            assert contents is not None
            state = ctx.state(lambda: np.array(contents))
            return Tensor(x.dtype, x.shape, state.buffer)
        copied = ctx.empty(x.shape, x.dtype)
        ctx.copy(copied, x)  # a Run copies nothing if the application bound input and output to the same memory
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
        """Return the size that a Run stores in the output ``size.output``; the Run fails if it exceeds its bound."""
        what = f"size tensor {size.output} of {self._label}"
        ctx = self._ctx
        (found,) = ctx.read_back(memories[size.output].tensor, what, likely=hint(size.opt))
        within = logical_and(le(0, found), le(found, size.upper))
        ctx.require(within, f"{what} is not between 0 and its upper bound")
        return found

    # ---- calls of enqueue ----

    def _enqueue(
        self,
        formats: Combination,
        types: Sequence[DType],
        shapes: Sequence[tuple[Any, ...]],
        inputs: Sequence[Tensor | None],
        memories: Sequence[_Memory],
    ) -> None:
        build, ctx = self._answers.build, self._ctx
        given, results = self._answers.descs(types, shapes, formats, -1)
        ranges = [[desc and dynamic(desc) for desc in descs] for descs in (given, results)]
        about = f"for inputs of {shown(desc and desc.dims for desc in given)}"
        if not self._answers.check("configure_plugin", build.configure_plugin, *ranges, about=about):
            return
        sized = [[desc and dynamic(desc, keep=True) for desc in descs] for descs in (given, results)]
        nbytes = self._answers.ask("get_workspace_size", build.get_workspace_size, *sized, about=about)
        try:
            size = dim_of(nbytes)
        except TypeError as error:
            raise PluginFailure(
                f"{self._label}: get_workspace_size returned {nbytes!r}, expected a number of bytes"
            ) from error
        ctx.require(le(0, size), f"{self._label}: get_workspace_size returned a negative number of bytes")
        workspace = ctx.empty((size,), DType.UINT8)
        tactics = [self._tactic] if self._tactic is not None else self._answers.tactics()
        runtime: PluginRuntime = capability(self._plugin, self._label, CapabilityType.RUNTIME)
        writes = [memory.tensor for memory in memories]
        if size != 0:
            writes.append(workspace)
        if not runtime.enqueue_is_recorded:
            each_run(ctx, self._creator, self._label, self._plugin, tactics[0], [*given], [*results], inputs, writes)
            return
        self._record(tactics[0], given, results, inputs, memories, workspace, writes)

    def _record(
        self,
        tactic: int,
        given: Sequence[PluginTensorDesc | None],
        results: Sequence[PluginTensorDesc],
        inputs: Sequence[Tensor | None],
        memories: Sequence[_Memory],
        workspace: Tensor,
        writes: Sequence[Tensor],
    ) -> None:
        ctx, label = self._ctx, self._label
        _, runtime = attached(label, self._plugin, is_emulated=not ctx.device.runs_cubins)
        self._answers.ask("set_tactic", runtime.set_tactic, tactic, about=str(tactic))
        about = f"for inputs of {shown(desc and desc.dims for desc in given)}"
        if not self._answers.check("on_shape_change", runtime.on_shape_change, given, results, about=about):
            return

        scope = self._answers.scope
        tensors = [None if x is None else RecordedTensor(x, scope) for x in inputs]
        targets = [RecordedTensor(memory.tensor, scope) for memory in memories]
        stream = RecordedStream(ctx, writes, workspace)
        arguments = (given, results, tensors, targets, RecordedTensor(workspace, scope), stream)
        self._answers.check("enqueue", runtime.enqueue, *arguments, about=about)


@functools.cache
def warn_unmeasured(label: str) -> None:
    """Log, once per process and ``label``, that autotuning takes the first tactic of a plugin."""
    report(
        f"{label}: autotune measures none of its tactics and formats, because get_timing_cache_id returns None: the "
        "first tactic is used. Return a text that identifies the work of the plugin object, such as its attributes",
        level="WARNING",
    )


def pack_channels(ctx: Lowering, x: Tensor, vector: int) -> Tensor:
    """Convert [N, C, ...] to [N, ceil(C / vector), ..., vector], padded with 0."""

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        channel = c[1] * vector + c[-1]
        source = maps.source(x)
        return source.at([c[0], channel, *c[2:-1]], channel < source.dim(1))

    return gather_map(ctx, (x.shape[0], ceildiv(x.shape[1], vector), *x.shape[2:], vector), x.dtype, element)


def unpack_channels(ctx: Lowering, x: Tensor, channels: Dim) -> Tensor:
    """Convert [N, ceil(C / vector), ..., vector] back to [N, C, ...]; the inverse of `pack_channels`."""
    vector = x.shape[-1]
    assert isinstance(vector, int)

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        return maps.source(x).at([c[0], s.trunc_divide(c[1], vector), *c[2:], s.trunc_modulo(c[1], vector)])

    return gather_map(ctx, (x.shape[0], channels, *x.shape[2:-1]), x.dtype, element)
