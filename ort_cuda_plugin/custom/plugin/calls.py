"""Calls methods of an application's plugin object when a plan is built, and its `enqueue` in each Run."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ...model.ir import DType, InvalidModel, NodeError, Unsupported
from ...program.lowering.context import Lowering, Tensor
from ...program.steps.callbacks import Callback, CallStream, DeviceArray
from .descriptors import PluginTensorDesc, TensorFormat, packed_channels
from .fields import fields_to_json
from .interfaces import CapabilityType, Plugin, PluginCreator, PluginResourceContext, PluginRuntime
from .streams import RunStream

T = TypeVar("T")


class PluginFailure(Exception):
    """A method of an application's plugin failed or returned an impossible value.

    The message names method and value.
    """

    ort_code = 1  # ORT_FAIL
    log_level = "ERROR"


def called(label: str, subject: str, function: Callable[..., T], *arguments: Any) -> T:
    """Call a method of an application's plugin. Raises PluginFailure for its exceptions and a status other than 0.

    Unsupported, InvalidModel, NodeError and KeyboardInterrupt are passed on.
    """
    try:
        result = function(*arguments)
    except (Unsupported, InvalidModel, NodeError, PluginFailure, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise PluginFailure(f"{label}: {subject}: {type(error).__name__}: {error}") from error
    is_status = subject.split(" ")[0] in ("configure_plugin", "on_shape_change", "enqueue", "set_tactic")
    if is_status and isinstance(result, int) and result != 0:
        raise PluginFailure(f"{label}: {subject}: it returned the status {result}, expected 0 for success")
    return result


def attached(label: str, plugin: Plugin, *, is_emulated: bool) -> tuple[Plugin, PluginRuntime]:
    """Return the clone of ``plugin`` that ``attach_to_context`` makes, and its runtime capability.

    Raises PluginFailure.
    """
    runtime = plugin.get_capability_interface(CapabilityType.RUNTIME)
    context = PluginResourceContext(is_emulated)
    clone: Plugin | None = called(label, "attach_to_context", runtime.attach_to_context, context)
    own = None if clone is None else clone.get_capability_interface(CapabilityType.RUNTIME)
    if clone is None or not isinstance(own, PluginRuntime):
        raise PluginFailure(f"{label}: attach_to_context returned no plugin with a RUNTIME capability")
    return clone, own


@dataclass(frozen=True)
class Tensors:
    """The tensors of an `enqueue` in a Run: inputs, outputs, and whether there is scratch memory.

    ``given`` says for each input whether the node has it. ``inputs``, without omitted ones, and ``outputs`` have for
    each tensor (element type, format, number of channels if the format packs them into vectors, else 0). ``wild`` has
    for each output the dimensions whose sizes `enqueue` computes.
    """

    given: tuple[bool, ...]
    inputs: tuple[tuple[str, str, int], ...]
    outputs: tuple[tuple[str, str, int], ...]
    wild: tuple[tuple[int, ...], ...]
    has_workspace: bool

    def descs(self, arrays: Sequence[DeviceArray]) -> tuple[list[PluginTensorDesc | None], list[PluginTensorDesc]]:
        """Return descriptions of inputs and outputs with the sizes of a Run; None for an input that the node omits."""
        rows = [*self.inputs, *self.outputs]
        descs = []
        for number, ((dtype, format, channels), array) in enumerate(zip(rows, arrays, strict=False)):
            kind, dims = TensorFormat[format], array.shape
            if packed_channels(kind) > 1:
                dims = (dims[0], channels, *dims[2:-1])
            elif kind is not TensorFormat.LINEAR:
                dims = (dims[0], dims[-1], *dims[1:-1])
            place = number - len(self.inputs)
            if place >= 0:
                dims = tuple(-1 if axis in self.wild[place] else size for axis, size in enumerate(dims))
            descs.append(PluginTensorDesc(dims, DType[dtype], kind))
        of_inputs = iter(descs)
        return [next(of_inputs) if is_given else None for is_given in self.given], descs[len(self.inputs) :]


class EnqueueFunction:
    """Calls `enqueue` in each Run. Concurrent Runs use separate clones of the application's plugin."""

    def __init__(self, label: str, plugin: Plugin, tactic: int, tensors: Tensors) -> None:
        self._label, self._plugin, self._tactic, self._tensors = label, plugin, tactic, tensors
        self._idle: list[_Context] = []
        self._lock = threading.Lock()

    def __call__(self, tensors: Sequence[DeviceArray], numbers: Sequence[int], stream: CallStream) -> None:
        with self._lock:
            context = self._idle.pop() if self._idle else None
        if context is None:
            plugin, runtime = attached(self._label, self._plugin, is_emulated=stream.is_emulated)
            context = _Context(plugin, runtime)
            called(self._label, f"set_tactic {self._tactic}", runtime.set_tactic, self._tactic)
        try:
            self._enqueue(context, tensors, stream)
        finally:
            with self._lock:
                self._idle.append(context)

    def _enqueue(self, context: _Context, tensors: Sequence[DeviceArray], stream: CallStream) -> None:
        layout, runtime = self._tensors, context.runtime
        given, results = layout.descs(tensors)
        about = "for inputs of " + (
            ", ".join(str(list(desc.dims)) if desc else "nothing" for desc in given) or "no inputs"
        )
        shapes = tuple(x.shape for x in tensors)
        if context.shapes != shapes:
            context.shapes = None
            called(self._label, f"on_shape_change {about}", runtime.on_shape_change, given, results)
            context.shapes = shapes
        rest = iter(tensors)
        inputs = [next(rest) if is_given else None for is_given in layout.given]
        outputs = [next(rest) for _ in layout.outputs]
        workspace = next(rest) if layout.has_workspace else DeviceArray(0, (0,), DType.UINT8, tensors[0].stream)
        used = {x.address for x in inputs if x is not None}
        fresh = [x for x in (*outputs, workspace) if x.address not in used]
        watched = [_Watched(x.address, x.shape, x.dtype, x.stream) for x in outputs]
        arguments = (given, results, inputs, watched, workspace, RunStream(stream, fresh, workspace))
        called(self._label, f"enqueue {about}", runtime.enqueue, *arguments)
        for number, (output, wild) in enumerate(zip(watched, layout.wild, strict=True)):
            if not output.is_known and output.size != 0 and not wild and outputs[number].address not in used:
                raise PluginFailure(
                    f"{self._label}: enqueue {about}: nothing writes output {number}: launch a kernel that does"
                )


class _Watched(DeviceArray):
    """An output that records whether `enqueue` requested its address: if not, `enqueue` cannot have written it."""

    is_known = False

    def __getattribute__(self, name: str) -> Any:
        if name == "address":
            object.__setattr__(self, "is_known", True)
        return super().__getattribute__(name)


@dataclass
class _Context:
    """A clone of an application's plugin object, attached to a device, that serves one Run at a time."""

    plugin: Plugin
    runtime: PluginRuntime
    shapes: tuple[tuple[int, ...], ...] | None = None


def _row(desc: PluginTensorDesc) -> tuple[str, str, int]:
    return desc.type.name, desc.format.name, desc.dims[1] if packed_channels(desc.format) > 1 else 0


def each_run(
    ctx: Lowering,
    creator: PluginCreator,
    label: str,
    plugin: Plugin,
    tactic: int,
    given: Sequence[PluginTensorDesc | None],
    results: Sequence[PluginTensorDesc],
    inputs: Sequence[Tensor | None],
    writes: Sequence[Tensor],
) -> None:
    """Record a callback that calls `enqueue` in each Run.

    ``writes`` are the outputs, then scratch memory if there is any.
    """
    layout = Tensors(
        tuple(x is not None for x in inputs),
        tuple(map(_row, filter(None, given))),
        tuple(map(_row, results)),
        tuple(
            tuple(axis for axis, size in enumerate(desc.dims) if isinstance(size, int) and size == -1)
            for desc in results
        ),
        len(writes) > len(results),
    )
    tensors = [*(x for x in inputs if x is not None), *writes]
    runtime = plugin.get_capability_interface(CapabilityType.RUNTIME)
    fields = called(label, "get_fields_to_serialize", runtime.get_fields_to_serialize)
    stored: Mapping[str, Any] = {
        "kind": "plugin",
        "name": creator.get_plugin_name(),
        "version": creator.get_plugin_version(),
        "namespace": creator.get_plugin_namespace(),
        "fields": fields_to_json(fields),
        "tactic": tactic,
        "given": list(layout.given),
        "inputs": [list(row) for row in layout.inputs],
        "outputs": [list(row) for row in layout.outputs],
        "wild": [list(axes) for axes in layout.wild],
        "has_workspace": layout.has_workspace,
        "tensors": [[x.dtype.name, x.rank] for x in tensors],
    }
    digest = hashlib.sha256(json.dumps(stored).encode()).hexdigest()
    node = "" if ctx.node is None else ctx.node.name
    callback = Callback(
        (node, digest),
        f"enqueue of {label}",
        tuple((x.dtype, x.rank) for x in tensors),
        function=lambda: EnqueueFunction(label, plugin, tactic, layout),
        stored={**stored, "node": node},
    )
    ctx.call_back(callback, tensors, writes=writes)
