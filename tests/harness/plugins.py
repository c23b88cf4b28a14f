"""A test plugin (as in TensorRT) with replaceable methods, which records its calls, and lowering contexts for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ort_cuda_plugin.custom.kernels.kernels import numba_kernel
from ort_cuda_plugin.custom.operator import Port
from ort_cuda_plugin.custom.plugin import (
    Phase,
    Plugin,
    PluginBuild,
    PluginCore,
    PluginCreator,
    PluginField,
    PluginFieldCollection,
    PluginFieldType,
    PluginRuntime,
)
from ort_cuda_plugin.custom.plugin.node import PluginNodes
from ort_cuda_plugin.model.ir import DType, Node, Value
from ort_cuda_plugin.ops.registry import FLOATS
from ort_cuda_plugin.program.expressions.symbolic import Dim, symbol
from ort_cuda_plugin.program.lowering.context import Buffer, BufferKind, DeviceProperties, Lowering, Tensor

Note = list[tuple[str, tuple[Any, ...]]]


def double(x: Any, y: Any, n: int) -> None:
    for i in range(n):
        y[i] = x[i] * 2


DOUBLE = numba_kernel(double)


class Probe(Plugin, PluginCore, PluginBuild, PluginRuntime):
    """A plugin for y = 2 * x. ``methods`` replace its methods; ``notes`` has the calls of all clones, in order."""

    def __init__(self, methods: Mapping[str, Callable[..., Any]], notes: Note, fields: PluginFieldCollection) -> None:
        self.methods, self.notes, self.fields = methods, notes, fields

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if name.startswith("_") or name in ("methods", "notes", "fields") or not callable(found):
            return found
        replaced = self.methods.get(name, found)

        def noted(*arguments: Any) -> Any:
            self.notes.append((name, arguments))
            return replaced(*arguments)

        return noted

    @property
    def enqueue_is_recorded(self) -> bool:  # type: ignore[override]
        return not self.fields.get("each_run", 0)

    def get_plugin_name(self) -> str:
        return "Probe"

    def get_plugin_namespace(self) -> str:
        return "test.plugins"

    def clone(self) -> Plugin:
        return Probe(self.methods, self.notes, self.fields)

    def get_output_data_types(self, input_types: Sequence[DType]) -> Sequence[DType]:
        return list(input_types)

    def get_output_shapes(self, inputs: Any, shape_inputs: Any, expr_builder: Any) -> Any:
        return inputs

    def enqueue(self, input_desc: Any, output_desc: Any, inputs: Any, outputs: Any, workspace: Any, stream: Any) -> Any:
        stream.launch(DOUBLE, 1, 1, [inputs[0], outputs[0], inputs[0].size])

    def get_fields_to_serialize(self) -> PluginFieldCollection:
        return self.fields


class ProbeCreator(PluginCreator):
    """Creates `Probe`s with ``methods``. "create_plugin" in ``methods`` replaces the creator's own method."""

    inputs: Sequence[Port] = (Port("x", FLOATS, "T"),)
    outputs = (Port("y", FLOATS, "T"),)

    def __init__(self, **methods: Callable[..., Any]) -> None:
        self.methods, self.notes = methods, Note()
        self.phases: list[Phase] = []

    def get_plugin_name(self) -> str:
        return "Probe"

    def get_plugin_namespace(self) -> str:
        return "test.plugins"

    def get_field_names(self) -> PluginFieldCollection:
        return PluginFieldCollection(
            [
                PluginField("each_run", type=PluginFieldType.INT32),
                PluginField("scale", type=PluginFieldType.FLOAT32),
                PluginField("pads", type=PluginFieldType.INT8, length=0),
                PluginField("mode", type=PluginFieldType.CHAR),
                PluginField("data", type=PluginFieldType.UNKNOWN),
            ]
        )

    def create_plugin(self, name: str, fields: PluginFieldCollection, phase: Phase) -> Plugin | None:
        self.phases.append(phase)
        if "create_plugin" in self.methods:
            made: Plugin | None = self.methods["create_plugin"](name, fields, phase)
            return made
        return Probe(self.methods, self.notes, fields)

    def arguments(self, method: str) -> list[tuple[Any, ...]]:
        """Return the arguments of each call of a plugin's method."""
        return [arguments for name, arguments in self.notes if name == method]


def tensor(shape: Sequence[Dim | str], dtype: DType = DType.FLOAT32, index: int = 0) -> Tensor:
    """Return an input of a cluster. A size given by a name is symbolic, with the expected value 6."""
    dims = tuple(symbol(10 * index + i, d, 6, 0, None) if isinstance(d, str) else d for i, d in enumerate(shape))
    nbytes: Dim = dtype.itemsize
    for dim in dims:
        nbytes = nbytes * dim
    return Tensor(dtype, dims, Buffer(BufferKind.INPUT, nbytes, index=index))


def context(device: DeviceProperties | None = None) -> Lowering:
    """Return a lowering context for a node ``Probe`` with one input and one output."""
    ctx = Lowering(device or DeviceProperties())
    value = Value("x", DType.FLOAT32, None)
    ctx.node = Node("mine", "Probe", "test.plugins", 1, (value,), (Value("y", None, None),))
    return ctx


def lowered(
    creator: PluginCreator, *inputs: Tensor | None, ctx: Lowering | None = None, **attributes: Any
) -> list[Tensor]:
    """Lower a node of a creator, and return its outputs."""
    return PluginNodes(creator).lower(ctx or context(), list(inputs), attributes)
