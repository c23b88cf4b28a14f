"""Compiled models (EP contexts) for tests: written and loaded on the emulated device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import NodeProto, helper, numpy_helper

import ort_cuda_plugin
from ort_cuda_plugin.context.storage.container import Builder, Container, _Array
from ort_cuda_plugin.context.storage.files import ModelFolder, open_context
from ort_cuda_plugin.context.storage.hashing import array_digest
from session_pair import FLOAT, info

BINARY = f"{{}}_{ort_cuda_plugin.get_ep_name()}.bin"
RNG = np.random.default_rng(11)
WEIGHT = RNG.standard_normal((16, 8), dtype=np.float32)


def row_model(*extra: NodeProto, output: str = "y", kind: int = FLOAT, **constants: np.ndarray) -> bytes:
    """Return y = softmax(relu(x w)) of x [n, m, 16], with ``extra`` nodes that read y."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Softmax", ["b"], ["y"], axis=-1),
        *extra,
    ]
    initializers = [numpy_helper.from_array(array, name) for name, array in {"w": WEIGHT, **constants}.items()]
    graph = helper.make_graph(
        nodes, "rows", [info("x", FLOAT, ["n", "m", 16])], [info(output, kind, None)], initializers
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return bytes(made.SerializeToString())


def two_clusters() -> bytes:
    """Return `row_model` with a second cluster, a GEMM, after nodes that only the CPU provider runs."""
    back = [
        helper.make_node("Cast", ["y"], ["text"], to=onnx.TensorProto.STRING),
        helper.make_node("Cast", ["text"], ["back"], to=FLOAT),
        helper.make_node("MatMul", ["back", "v"], ["z"]),
    ]
    return row_model(*back, output="z", v=RNG.standard_normal((8, 5), dtype=np.float32))


def settings(entries: Mapping[str, str] | None = None, options: Mapping[str, str] | None = None) -> ort.SessionOptions:
    """Return session options with the emulated device."""
    made = ort.SessionOptions()
    made.log_severity_level = 3
    for key, value in (entries or {}).items():
        made.add_session_config_entry(key, value)
    made.add_provider_for_devices(ort_cuda_plugin.register(emulate=True)[:1], dict(options or {}))
    return made


def compile_model(
    model: bytes | str,
    path: Path,
    embed: bool = False,
    prefix: str = "",
    level: ort.GraphOptimizationLevel = ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    **options: str,
) -> onnx.ModelProto:
    """Create a session that writes a compiled model to ``path``, and return this model."""
    entries = {"ep.context_enable": "1", "ep.context_file_path": str(path), "ep.context_embed_mode": str(int(embed))}
    if prefix:
        entries["ep.context_node_name_prefix"] = prefix
    made = settings(entries, options)
    made.graph_optimization_level = level
    ort.InferenceSession(model, made)
    return onnx.load(path)


def load(
    model: Path | bytes, host_code: bool = True, file_path: Path | None = None, severity: int = 3, **options: str
) -> ort.InferenceSession:
    """Return a session of a compiled model on the emulated device."""
    entries = {} if file_path is None else {"ep.context_file_path": str(file_path)}
    made = settings(entries, {"context_allow_host_code": str(int(host_code)), **options})
    made.log_severity_level = severity
    return ort.InferenceSession(model if isinstance(model, bytes) else str(model), made)


def container_of(path: Path) -> Container:
    """Return the container in a context file."""
    return Container(open_context(ModelFolder.of(path), path.name), "it")


def context_nodes(model: onnx.ModelProto) -> list[dict[str, object]]:
    """Return the attributes of each EPContext node of the model, in order."""
    return [
        {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        for node in model.graph.node
        if node.op_type == "EPContext"
    ]


def rows(*shape: int) -> np.ndarray:
    return RNG.standard_normal((*shape, 16), dtype=np.float32)


def assert_same(session: ort.InferenceSession, source: bytes, feeds: Sequence[Mapping[str, np.ndarray]]) -> None:
    """Assert that the session's outputs equal those of the source model on the CPU provider."""
    cpu = ort.InferenceSession(source, providers=["CPUExecutionProvider"])
    for feed in feeds:
        for actual, expected in zip(session.run(None, feed), cpu.run(None, feed), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5, strict=True)


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """Assert that the block does at least one Run, compiles no kernel and builds no plan."""
    before = ort_cuda_plugin.counters()
    yield
    after = ort_cuda_plugin.counters()
    assert {name: after[name] - before[name] for name in ("kernels_compiled", "plan_variants_built")} == {
        "kernels_compiled": 0,
        "plan_variants_built": 0,
    }
    assert after["runs"] > before["runs"]


def rewrite(container: Container, path: Path, index: Any, replaced: Mapping[int, bytes]) -> None:
    """Write a container with another index and the arrays of ``container``, some of them replaced."""
    builder = Builder()
    for number in range(len(container.index["arrays"])):
        data = memoryview(replaced.get(number, container.array(number)))
        builder.arrays.append(_Array(len(data), array_digest(data), data))
    builder.write(path, {key: value for key, value in index.items() if key != "arrays"})
