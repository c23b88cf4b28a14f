"""Derives the work of a Run from a model or a cluster's plan, without a device."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx

from ..abi.core import core, ffi
from ..abi.errors import Error
from ..clusters.claims.claims import claim
from ..clusters.cluster import CompiledCluster
from ..gpus import Gpu
from ..gpus import gpu as described_gpu
from ..gpus.calibration import Calibration
from ..model.ir import Graph, Node, Value
from ..model.onnx_graph import read_model
from ..models import is_wheel_model, with_noise_weights
from ..passes.table import Watch
from ..program.analysis.traffic import accesses, arithmetic
from ..program.expressions.symbolic import hint
from ..program.lowering.context import DeviceProperties, LoweringOptions
from ..program.steps.libraries import ATTENTION, CONV, MATMUL
from ..program.steps.steps import Contract, Convolve
from ..program.steps.tensor import Buffer, BufferKind, Tensor
from ..program.steps.trace import (
    Copy,
    DeviceLoop,
    Float32,
    Float64,
    HostCall,
    Int32,
    Int64,
    Launch,
    LibraryCall,
    LoopCondition,
    Memset,
    Recordable,
    scalar_types,
)
from ..program.steps.trace import Step as PlannedStep
from ..session_errors import own_operator
from .libraries import peak_kind
from .work import Access, Argument, CopyStep, KernelStep, LibraryStep, Number, Pointer, Product, Region, Step, Work

SMALL_CONTENTS = 1 << 16
"""Maximum bytes of an integer weight whose contents are copied to the emulated device."""
LIBRARIES = frozenset({"cublaslt", "cudnn"})
MAX_ITERATIONS = 1024
"""Maximum iterations of a loop on the device that an estimate counts."""


class ShapeError(Error, ValueError):
    """The given shapes do not fit the model."""


def optimized(path: Path, shapes: Mapping[str, Sequence[int]] | None = None) -> onnx.ModelProto:
    """Return the model after the optimizations that ONNX Runtime does before it offers nodes to providers.

    The wheel's light models get weights. ``shapes`` override the sizes that the model states for its inputs. A model
    is not optimized if the CPU provider cannot run it because of its types or custom operators, or if ONNX Runtime
    inserts Casts for this provider.
    """
    import onnxruntime as ort
    from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernel

    light = is_wheel_model(path)
    model = onnx.load(path, load_external_data=False)
    changed = _restated(model, shapes or {})
    if light and changed:
        _without_batch(model)
    with tempfile.TemporaryDirectory() as folder:
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(Path(folder, "model.onnx"))
        options.log_severity_level = 3
        source: str | bytes = str(path)
        if light:
            source = with_noise_weights(model).SerializeToString()
        elif changed:
            onnx.load_external_data_for_model(model, str(path.parent))
            source = model.SerializeToString()
        try:
            ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            if not (isinstance(error, NoKernel) or own_operator(error)):
                raise
        else:
            optimized = onnx.load(options.optimized_model_filepath, load_external_data=False)
            if not _is_for_cpus(optimized):
                # The optimized model refers to the model's external data by the same file names.
                onnx.load_external_data_for_model(optimized, str(path.parent))
                return optimized
    return onnx.load_from_string(source) if isinstance(source, bytes) else onnx.load(path)


def _is_for_cpus(model: onnx.ModelProto) -> bool:
    """Return whether ONNX Runtime has inserted Casts into a half-precision model for its CPU provider."""
    inserted = ("InsertedPrecisionFreeCast_", "InsertedCast_")
    return any(node.op_type == "Cast" and node.name.startswith(inserted) for node in model.graph.node)


def _restated(model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]) -> bool:
    """Replace the sizes that the model states for its inputs by those in ``shapes``; return whether one differed."""
    changed = False
    for info in model.graph.input:
        for dim, size in zip(info.type.tensor_type.shape.dim, shapes.get(info.name, ()), strict=False):
            if dim.HasField("dim_value") and dim.dim_value != size:
                dim.dim_value, changed = size, True
    if changed:
        del model.graph.value_info[:]
        for info in model.graph.output:
            info.type.tensor_type.ClearField("shape")
    return changed


def _without_batch(model: onnx.ModelProto) -> None:
    """Replace the batch size of 1 in Reshapes by -1 or 0, so that the wheel's light models run with other batches."""
    contents = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Reshape" and node.input[1] in contents:
            sizes = onnx.numpy_helper.to_array(contents[node.input[1]]).copy()
            if sizes.size and sizes[0] == 1:
                sizes[0] = -1 if -1 not in sizes else 0
                name = node.input[1]
                contents[name].CopyFrom(onnx.numpy_helper.from_array(sizes, name))


def work_of_model(
    model: onnx.ModelProto,
    shapes: Mapping[str, Sequence[int]],
    values: Mapping[str, int] | None = None,
    options: LoweringOptions | None = None,
    libraries: frozenset[str] = LIBRARIES,
    watch: Watch | None = None,
    gpu: Gpu | None = None,
    calibration: Calibration | None = None,
) -> Work:
    """Return the work of a Run of a model from `optimized` on ``gpu``, by default an H100, with inputs of these shapes.

    Schedules are chosen as in a session on a GPU with this ``calibration``. Dimensions that stay unknown are 1.
    ``values`` fill integer inputs. Other inputs are 1 if the host reads them, else 0. ``watch`` receives each cluster's
    program after each pass.

    Raises: ShapeError, and NodeError for a node that cannot run.
    """
    sizes = input_shapes(model, shapes)
    gpu = gpu or described_gpu("h100")
    device = DeviceProperties(
        False, libraries, gpu.compute_capability, gpu.multiprocessors, tf32=True, calibration=calibration
    )
    graph = read_model(model)
    claims = claim(graph, device, options)
    elsewhere = tuple(
        node.label for node, verdict in zip(graph.nodes, claims.verdicts, strict=True) if not verdict.supported
    )
    if not elsewhere and len(claims.clusters) == 1:
        clusters = [graph]
    else:
        known = read_model(with_shapes(model, sizes))
        sizes = {v.name: _sizes(v) for node in known.nodes for v in (*node.inputs, *node.outputs) if v} | sizes
        clusters = [_subgraph(graph, nodes) for nodes in claims.clusters]
    values = values or {}
    gatherer = Gatherer(
        {
            v.name: np.array(values[v.name], v.dtype.numpy).tobytes()
            for v in graph.inputs
            if v.name in values and v.dtype is not None
        }
    )
    products: list[Product] = []
    for cluster in clusters:
        compiled = CompiledCluster(cluster, device, options)
        launches: list[Sequence[Recordable]] = []

        lowered: list[Sequence[PlannedStep]] = []

        def note(
            name: str,
            steps: Sequence[PlannedStep],
            launches: list[Sequence[Recordable]] = launches,
            lowered: list[Sequence[PlannedStep]] = lowered,
        ) -> None:
            if name == "dead_code_elimination":
                lowered.append(steps)
            if name in ("emission", "constant_folding"):
                launches.append(steps)  # type: ignore[arg-type]
            if watch:
                watch(name, steps)

        compiled.watch = note
        if compiled.prepare().plan is None:
            launches.clear()
            host = [compiled.inputs[index] for index in compiled.host_inputs]
            counts = {value.name: int(np.prod(sizes[value.name], dtype=np.int64)) for value in host}
            filled = [[values.get(value.name, 1)] * counts[value.name] for value in host]
            compiled.build([sizes[value.name] for value in compiled.inputs], filled)
        names = ([v.name for v in compiled.inputs], [v.name for v in compiled.outputs])
        gatherer.add(launches[-1], *names)
        products += _products(lowered[-1], options or LoweringOptions())
    return Work(tuple(gatherer.regions), tuple(gatherer.steps), tuple(products), elsewhere)


def _products(steps: Sequence[PlannedStep], options: LoweringOptions) -> Iterator[Product]:
    """Yield the arithmetic of each GEMM and convolution among ``steps``."""
    for step in steps:
        if isinstance(step, Contract | Convolve):
            kind = peak_kind(step.operands[0].dtype.onnx, options.use_tf32)
            yield kind, arithmetic(step), tuple(node.label for node in step.nodes)


def input_shapes(model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all inputs, with 1 for a dimension without a size.

    The size that ``shapes`` gives a named dimension applies to all inputs. Raises ShapeError if ``shapes`` does not fit
    the model.
    """
    initializers = {tensor.name for tensor in model.graph.initializer}
    inputs = [info for info in model.graph.input if info.name not in initializers]
    if unknown := shapes.keys() - {info.name for info in inputs}:
        raise ShapeError(f"{unknown.pop()!r} is not an input; the inputs are {', '.join(info.name for info in inputs)}")
    told: dict[str, int] = {}
    for info in inputs:
        dims = info.type.tensor_type.shape.dim
        if info.name in shapes:
            if len(shapes[info.name]) != len(dims):
                raise ShapeError(f"input {info.name!r}: got {len(shapes[info.name])} sizes, expected {len(dims)}")
            for axis, (dim, size) in enumerate(zip(dims, shapes[info.name], strict=True)):
                if dim.dim_param and told.setdefault(dim.dim_param, size) != size:
                    raise ShapeError(
                        f"input {info.name!r}: got size {size} for dimension {dim.dim_param!r}, expected"
                        f" {told[dim.dim_param]}, the size where the dimension occurs first"
                    )
                if dim.HasField("dim_value") and dim.dim_value != size:
                    raise ShapeError(
                        f"input {info.name!r}: got size {size} in dimension {axis}, expected {dim.dim_value}, the "
                        "size in the model"
                    )
    found = {}
    for info in inputs:
        dims = info.type.tensor_type.shape.dim
        sizes = [dim.dim_value if dim.HasField("dim_value") else told.get(dim.dim_param, 1) for dim in dims]
        found[info.name] = tuple(shapes.get(info.name, sizes))
    return found


def with_shapes(model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]) -> onnx.ModelProto:
    """Return a copy of the model with the shapes of all values that ONNX infers from these shapes of inputs."""
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    fixed.ir_version = max(fixed.ir_version, 4)  # in older models ONNX ignores the shapes of initializers
    del fixed.graph.value_info[:]
    for info in fixed.graph.input:
        for dim, size in zip(info.type.tensor_type.shape.dim, shapes.get(info.name, ()), strict=False):
            dim.dim_value = size
    return onnx.shape_inference.infer_shapes(fixed, data_prop=True)


def _sizes(value: Value) -> tuple[int, ...]:
    return tuple(dim if isinstance(dim, int) else 1 for dim in value.shape or ())


def _subgraph(graph: Graph, nodes: Sequence[Node]) -> Graph:
    made = {value for node in nodes for value in node.outputs if value is not None}
    read = [value for node in nodes for value in node.reads() if value is not None and value.initializer is None]
    later = {value for node in graph.nodes if node not in set(nodes) for value in node.reads()} | set(graph.outputs)
    inputs = [value for value in dict.fromkeys(read) if value not in made]
    outputs = [value for node in nodes for value in node.outputs if value in later]
    return Graph(graph.name, list(nodes), inputs, outputs, graph.opsets)


def _flattened(launches: Sequence[Recordable]) -> Iterator[Recordable]:
    """Yield the launches, those of a loop once for each iteration.

    A loop whose condition the device evaluates counts one iteration, and no loop more than `MAX_ITERATIONS`.
    """
    for launch in launches:
        if isinstance(launch, DeviceLoop):
            yield from _flattened(launch.first)
            for _ in range(1 if launch.count is None else min(hint(launch.count), MAX_ITERATIONS)):
                yield from _flattened(launch.body)
        else:
            yield launch


class Gatherer:
    """Collects the regions and steps of the launches of a Run's plans. ``patterns``: contents of inputs, by name."""

    def __init__(self, patterns: Mapping[str, bytes]) -> None:
        self.patterns = patterns
        self.regions: list[Region] = []
        self.steps: list[Step] = []
        self._numbers: dict[Buffer, int] = {}
        self._inputs: dict[str, int] = {}
        self._ends: dict[str, int] = {}

    def add(self, launches: Sequence[Recordable], inputs: Sequence[str], outputs: Sequence[str]) -> None:
        """Add the launches of a plan whose inputs and outputs have these names."""
        launches = [*_flattened(launches)]
        self._number(launches, inputs, outputs)
        for launch in launches:
            reads, writes = ([self._access(one.tensor, one.bytes) for one in side] for side in accesses(launch))
            nodes = tuple(node.label for node in launch.nodes)
            shared = (nodes, tuple(reads), tuple(writes))
            if isinstance(launch, Launch):
                grid = (hint(launch.grid[0]), hint(launch.grid[1]), hint(launch.grid[2]))
                if 0 not in grid:
                    arguments = tuple(self._argument(launch, number) for number in range(len(launch.args)))
                    shared_bytes = hint(launch.shared_bytes)
                    turns = max(hint(launch.turns), 1)
                    self.steps.append(
                        KernelStep(*shared, launch.kernel, grid, launch.block, shared_bytes, arguments, turns)
                    )
            elif isinstance(launch, LibraryCall):
                sizes = tuple(hint(arg.value) for arg in launch.args if isinstance(arg, Int64))
                problem = launch.problem
                flags = frozenset(flag.name or "" for flag in type(problem.flags) if flag in problem.flags)
                kind = {MATMUL: "matmul", CONV: "conv", ATTENTION: "attention"}[problem.kind]
                self.steps.append(
                    LibraryStep(*shared, kind, problem.dtype, flags, problem.rank, sizes, getattr(launch, "note", ""))
                )
            else:
                kinds: dict[type[Recordable], str] = {Copy: "copy", Memset: "fill", HostCall: "Python"}
                kind = kinds.get(type(launch), "read back")
                self.steps.append(CopyStep(*shared, kind))

    def _number(self, launches: Sequence[Recordable], inputs: Sequence[str], outputs: Sequence[str]) -> None:
        """Assign a region to each buffer of the launches; intermediates share a slab, as in a Run."""
        lives: dict[Buffer, list[int]] = {}
        for position, launch in enumerate(launches):
            for buffer in (*launch.reads, *launch.writes):
                lives.setdefault(buffer, [position, position])[1] = position
        scratch = [buffer for buffer in lives if buffer.kind is BufferKind.SCRATCH]
        rows = ffi.new("ocp_slab_item[]", max(len(scratch), 1))
        for row, buffer in zip(rows, scratch, strict=False):
            row.bytes = hint(buffer.nbytes)
            row.first, row.last = lives[buffer]
        core().slab_pack(rows, len(scratch))
        offsets = {buffer: int(row.offset) for row, buffer in zip(rows, scratch, strict=False)}
        base = self._ends.get("scratch", 0)
        for buffer in lives:
            nbytes = hint(buffer.nbytes)
            if buffer in offsets:
                region = Region("scratch", f"intermediate {len(self.regions)}", nbytes, base + offsets[buffer])
                self._ends["scratch"] = max(self._ends.get("scratch", 0), region.offset + nbytes)
            else:
                names = inputs if buffer.kind is BufferKind.INPUT else outputs
                named = buffer.kind in (BufferKind.INPUT, BufferKind.OUTPUT) and 0 <= buffer.index < len(names)
                name = names[buffer.index] if named else f"weight {len(self.regions)}"
                if name in self._inputs:  # another cluster reads or writes the same value
                    self._numbers[buffer] = self._inputs[name]
                    continue
                kind = {BufferKind.INPUT: "input", BufferKind.OUTPUT: "output"}.get(buffer.kind, "weight")
                end = self._ends.get(kind, 0)
                region = Region(kind, name, nbytes, end, self._contents(buffer, name, nbytes))
                self._ends[kind] = -(-(end + nbytes) // 256) * 256
                if named:
                    self._inputs[name] = len(self.regions)
            self._numbers[buffer] = len(self.regions)
            self.regions.append(region)

    def _contents(self, buffer: Buffer, name: str, nbytes: int) -> bytes:
        if buffer.data is not None and nbytes <= SMALL_CONTENTS and buffer.data.dtype.is_integer:
            return np.ascontiguousarray(buffer.data.array).tobytes()
        if name in self.patterns and buffer.kind is BufferKind.INPUT:
            return self.patterns[name]
        return b""

    def _access(self, tensor: Tensor, nbytes: int) -> Access:
        offset = hint(tensor.offset) * tensor.dtype.itemsize
        return Access(self._numbers[tensor.buffer], max(offset, 0), nbytes)

    def _argument(self, launch: Launch, number: int) -> Argument:
        arg = launch.args[number]
        if isinstance(arg, Tensor):
            return Pointer(self._numbers[arg.buffer], hint(arg.offset) * arg.dtype.itemsize)
        if isinstance(arg, (Float32, Float64)):
            return Number(scalar_types[type(arg)], arg.value)
        if isinstance(arg, LoopCondition):
            return Number("i64", 0)
        return Number("i32" if isinstance(arg, Int32) else "i64", hint(arg.value))
