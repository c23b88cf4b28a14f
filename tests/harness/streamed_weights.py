"""Models whose weights are larger than the emulated device's memory, and sessions that stream these weights."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

import ort_cuda_plugin
from ort_cuda_plugin.ep.provider import last_provider
from ort_cuda_plugin.plan.placement import StreamingSchedule

WIDTH = 512
"""Rows and columns of each weight."""
LAYER_BYTES = WIDTH * WIDTH * 4

SMALL_REGIONS = {"arena.initial_chunk_size_bytes": "65536"}
"""Option for devices with little memory: by default, the arena's first region takes 1 MiB."""

Array = np.ndarray


def layers(count: int, batch: int | str = "batch", width: int = WIDTH, seed: int = 0) -> onnx.ModelProto:
    """Return y = tanh(tanh(x w0) w1)... of x [batch, width], with ``count`` weights of [width, width]."""
    rng = np.random.default_rng(seed)
    weights = [
        numpy_helper.from_array(rng.standard_normal((width, width), np.float32) / np.float32(width**0.5), f"w{i}")
        for i in range(count)
    ]
    nodes = []
    for i in range(count):
        nodes += [
            helper.make_node("MatMul", [f"x{i}" if i else "x", f"w{i}"], [f"p{i}"], name=f"product{i}"),
            helper.make_node("Tanh", [f"p{i}"], [f"x{i + 1}" if i < count - 1 else "y"], name=f"tanh{i}"),
        ]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, width]) for name in "xy"]
    graph = helper.make_graph(nodes, "layers", ports[:1], ports[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def feeds(batch: int, seed: int = 1, width: int = WIDTH) -> dict[str, Array]:
    return {"x": np.random.default_rng(seed).standard_normal((batch, width), np.float32)}


def expected(model: onnx.ModelProto, given: Mapping[str, Array]) -> list[Array]:
    """Return the outputs of the CPU provider."""
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(given)))


def schedules() -> list[StreamingSchedule]:
    """Return the schedules of the session that this thread created last."""
    provider = last_provider()
    assert provider is not None
    return [schedule for fused in provider.fused_nodes for schedule in fused.streaming]


def streaming_session(model: onnx.ModelProto, budget: str, **options: str) -> ort.InferenceSession:
    given = {"weight_budget": budget, **SMALL_REGIONS, **options}
    return ort_cuda_plugin.session(model.SerializeToString(), emulate=True, provider_options=given)


@contextmanager
def changes() -> Iterator[dict[str, int]]:
    """Yield a dict that receives the changes of all counters when the block ends."""
    before = ort_cuda_plugin.counters()
    found: dict[str, int] = {}
    yield found
    after = ort_cuda_plugin.counters()
    found.update({name: after[name] - before[name] for name in before})


def compiled(model: onnx.ModelProto, **options: str) -> tuple[tempfile.TemporaryDirectory[str], Path]:
    """Return a folder with a compiled form of the model, and the model's path in it."""
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name) / "compiled.onnx"
    made = ort.SessionOptions()
    for key, value in {"ep.context_enable": "1", "ep.context_file_path": str(path)}.items():
        made.add_session_config_entry(key, value)
    made.add_provider_for_devices(ort_cuda_plugin.register(emulate=True)[:1], options)
    ort.InferenceSession(model.SerializeToString(), made)
    return folder, path
