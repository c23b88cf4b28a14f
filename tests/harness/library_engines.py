"""Queries an installed cuDNN, without a GPU, for the engines of a plan's library calls on an H100."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from build_plugin import compiler
from c_programs import ROOT, SOURCES
from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.clusters.launches import make_launches
from ort_cuda_plugin.compiler.nvidia_packages import nvidia_files
from ort_cuda_plugin.ep.device.libraries import LIBRARIES, candidates
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.networks import NETWORKS
from ort_cuda_plugin.networks.graph import NetworkGraph
from ort_cuda_plugin.program.analysis.traffic import ProgramTraffic
from ort_cuda_plugin.program.expressions.symbolic import hint
from ort_cuda_plugin.program.lowering.context import DeviceProperties, LoweringOptions, Tensor
from ort_cuda_plugin.program.steps.trace import Int64, LibraryCall, Recordable

GPU = DeviceProperties(emulated=False, libraries=frozenset({"cublaslt", "cudnn"}))


@dataclass(frozen=True)
class Program:
    """The launches, library calls and memory traffic of a plan in each Run."""

    launches: list[Recordable]
    traffic: ProgramTraffic

    @property
    def calls(self) -> list[LibraryCall]:
        return [launch for launch in self.launches if isinstance(launch, LibraryCall)]


@dataclass(frozen=True)
class Engine:
    """The engine that cuDNN chooses for a problem; ``missing`` is the reason if there is none.

    ``saved`` is the size in bytes of cuDNN's serialized execution plan, ``loading`` the milliseconds to deserialize it;
    -1: that failed.
    """

    number: int = -1
    tensor_cores: bool = False
    workspace: int = 0
    milliseconds: int = 0
    saved: int = 0
    loading: int = -1
    missing: str = ""


def optimized(model: onnx.ModelProto, batch: int) -> onnx.ModelProto:
    """Return a model for ``batch`` images after ONNX Runtime's basic optimizations, which precede claims."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    for value in model.graph.input:
        shape = value.type.tensor_type.shape
        if len(shape.dim) > 1:
            shape.dim[0].dim_value = batch
    shapes = {node.input[1] for node in model.graph.node if node.op_type == "Reshape"}
    for tensor in model.graph.initializer:
        if tensor.name in shapes and (dims := numpy_helper.to_array(tensor)).size and dims[0] == 1:
            tensor.CopyFrom(numpy_helper.from_array(np.concatenate([[batch], dims[1:]]), tensor.name))
    del model.graph.value_info[:]
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    with tempfile.TemporaryDirectory() as folder:
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(Path(folder, "model.onnx"))
        options.log_severity_level = 3
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return onnx.shape_inference.infer_shapes(onnx.load(options.optimized_model_filepath))


def halved(
    model: onnx.ModelProto, element: int = TensorProto.FLOAT16, source: int = TensorProto.FLOAT
) -> onnx.ModelProto:
    """Replace the element type ``source`` by ``element`` in a copy of the model."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    graph, dtype = model.graph, helper.tensor_dtype_to_np_dtype(element)
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == source:
            value.type.tensor_type.elem_type = element
    for tensor in graph.initializer:
        if tensor.data_type == source:
            tensor.raw_data = numpy_helper.to_array(tensor).astype(dtype).tobytes()
            tensor.data_type = element
            tensor.ClearField("float_data")
    for node in graph.node:
        for attribute in node.attribute:
            is_number = attribute.name == "value_float" and source == TensorProto.FLOAT
            if is_number or (attribute.name == "value" and attribute.t.data_type == source):
                array = np.array(attribute.f if is_number else numpy_helper.to_array(attribute.t), dtype)
                value = helper.make_tensor("", element, array.shape, array.tobytes(), raw=True)
                attribute.CopyFrom(helper.make_attribute("value", value))
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == source:
                attribute.i = element
    return model


class PlainNetwork(NetworkGraph):
    """A network whose weights are 0, which are fast to make: only sizes matter here."""

    def _noise(self, shape: Sequence[int], deviation: float) -> NDArray[np.float32]:
        return np.zeros(tuple(shape), np.float32)


def network(
    name: str,
    batch: int,
    element: int = TensorProto.FLOAT,
    parts: Mapping[str, int] | None = None,
    unknown: Collection[str] = (),
) -> onnx.ModelProto:
    """Return a network of `ort_cuda_plugin.networks` with known sizes, except for the dimensions in ``unknown``.

    ``parts`` are further arguments of the function that writes the network, such as the number of ``layers``.
    """
    entry = NETWORKS[name]
    graph = PlainNetwork(name, "float32" if element == TensorProto.FLOAT else "float16", 0)
    entry.write(graph, **(parts or {}))
    model = graph.model()
    sizes = {**entry.sizes, "batch": batch}
    for value in model.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param and dim.dim_param not in unknown:
                dim.dim_value = sizes[dim.dim_param]
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    if element == TensorProto.BFLOAT16:
        model = halved(model, element, TensorProto.FLOAT16)
    return onnx.shape_inference.infer_shapes(model)


def lowered(
    model: onnx.ModelProto, options: LoweringOptions | None = None, shapes: Sequence[Sequence[int]] = ()
) -> Program:
    """Plan the whole model for an H100 with both libraries. ``shapes`` are a Run's input shapes, for symbolic sizes."""
    made: list[list[Recordable]] = []

    def noted(*arguments: Any) -> object:
        result = make_launches(*arguments)
        made.append(result[1])
        return result

    cluster = CompiledCluster(read_model(model), GPU, options or LoweringOptions())
    with mock.patch("ort_cuda_plugin.clusters.cluster.make_launches", noted):
        if cluster.prepare().plan is None:
            cluster.build(shapes, [])
    assert cluster.traffic is not None
    return Program(made[-1], cluster.traffic)


def question(call: LibraryCall) -> str:
    """Return the line of input with which tests/c/cudnn_engines.c looks up the engine of a call."""
    values = [hint(arg.value) for arg in call.args if isinstance(arg, Int64)]
    tensors = [arg for arg in call.args if isinstance(arg, Tensor)]
    addresses = [-(256 + hint(x.offset) * x.dtype.itemsize) for x in tensors[:-1]]
    problem = call.problem
    fields = [len(values), problem.kind, problem.dtype, int(problem.flags), problem.rank, problem.alpha]
    return " ".join(map(str, [*fields, *addresses, *values]))


class ConvolutionSizes(NamedTuple):
    """The first integer arguments of a convolution's library call."""

    images: int
    channels: int
    rows: int
    groups: int


def convolution(call: LibraryCall) -> ConvolutionSizes:
    """Return the first sizes of a call of cuDNN for a convolution."""
    return ConvolutionSizes(*[hint(arg.value) for arg in call.args if isinstance(arg, Int64)][:4])


def build_asker(folder: Path) -> list[str | Path] | None:
    """Build tests/c/cudnn_engines.c, and return the command that runs it; None if cuDNN is not installed."""
    found = [path for path in candidates(LIBRARIES[1]) if Path(path).is_absolute()]
    if not found:
        return None
    flags = ["-std=gnu11", "-O1", f"-I{ROOT / 'csrc_shim'}"]
    program = folder / "cudnn_engines"
    stub: list[str | Path] = [SOURCES / "stub_libcuda.c", "-shared", "-fPIC", "-o", folder / "libcuda.so.1"]
    files = ("base/error", "vendor/cudnn", "vendor/convolution", "vendor/attention")
    shim = [ROOT / "csrc_shim" / f"{name}.c" for name in files]
    own: list[str | Path] = [SOURCES / "cudnn_engines.c", *shim, "-o", program, "-ldl"]
    for arguments in (stub, own):
        subprocess.run([*compiler(), *flags, *arguments], check=True)
    return [program, found[0], SOURCES / "h100.json"]


def ask(command: Sequence[str | Path], questions: Sequence[str]) -> list[Engine]:
    """Return cuDNN's engine for each line of `question`, on an H100."""
    folders = [Path(command[0]).parent, *nvidia_files("*/lib")]
    done = subprocess.run(
        command,
        input="\n".join(questions),
        env=os.environ | {"LD_LIBRARY_PATH": os.pathsep.join(map(str, folders))},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    answers = list(_answers(done.stdout.splitlines()))
    assert len(answers) == len(questions), done.stderr
    return answers


def _answers(lines: Sequence[str]) -> Iterator[Engine]:
    for line in lines:
        if line.startswith("none"):
            yield Engine(missing=line.removeprefix("none "))
        else:
            number, tensor_cores, workspace, milliseconds, saved, loading = map(int, line.split())
            yield Engine(number, bool(tensor_cores), workspace, milliseconds, saved, loading)


def calls_of(program: Program, kind: int) -> list[LibraryCall]:
    """Return the library calls of one kind of problem, such as MATMUL."""
    return [call for call in program.calls if call.problem.kind == kind]
