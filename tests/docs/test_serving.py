"""docs/recipes/ray_serve.py: two replicas on two emulated devices; one of them is killed between requests."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnxruntime
import psutil
import pytest
from onnx import TensorProto, helper

serve = pytest.importorskip("ray.serve", reason="the extra serve is not installed")
ray = pytest.importorskip("ray")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "recipes" / "ray_serve.py"
REQUESTS = 400
BURST = 100
SHAPES = [(8, 2048), (2048, 2048), (2048, 2048), (2048, 4)]


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 80


def write_model(path: Path) -> None:
    """Save a model that runs long enough for a replica to have requests while it is killed."""
    noise = np.random.default_rng(0)
    weights = {f"w{i}": noise.standard_normal(shape, np.float32) / 64 for i, shape in enumerate(SHAPES)}
    nodes = [helper.make_node("MatMul", [f"x{i}", f"w{i}"], [f"x{i + 1}"]) for i in range(len(SHAPES))]
    graph = helper.make_graph(
        nodes,
        "serving",
        [helper.make_tensor_value_info("x0", TensorProto.FLOAT, ["batch", 8])],
        [helper.make_tensor_value_info(f"x{len(SHAPES)}", TensorProto.FLOAT, ["batch", 4])],
        [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    folder = tmp_path_factory.mktemp("serving")
    write_model(folder / "model.onnx")
    variables = {"MODEL": str(folder / "model.onnx"), "EMULATE": "1", "ORT_CUDA_PLUGIN_EMULATE_DEVICES": "2"}
    os.environ.update(variables)
    environment = {"env_vars": variables | {"PYTHONPATH": str(EXAMPLE.parent)}}
    ray.init(num_cpus=2, runtime_env=environment, include_dashboard=False, logging_level="WARNING")
    spec = importlib.util.spec_from_file_location("ray_serve", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    serve.shutdown()
    ray.shutdown()


def replica_processes() -> list[int]:
    """Return the processes of replicas, which Ray names after their class."""
    ours = psutil.Process().children(recursive=True)
    return [each.pid for each in ours if each.is_running() and "ServeReplica" in " ".join(each.cmdline())]


async def load(example: ModuleType, handle: Any, kill: int | None) -> list[tuple[int, np.ndarray]]:
    """Send bursts of requests and return the answers; a replica dies during the second burst."""
    tasks = []
    for number in range(REQUESTS):
        tasks.append(asyncio.create_task(example.ask(handle, np.full(8, number, np.float32))))
        if number % BURST == BURST - 1:
            await asyncio.sleep(0.1)
            if number // BURST == 1 and kill is not None:
                os.kill(kill, signal.SIGKILL)
            await asyncio.sleep(0.2)
    answers: list[tuple[int, np.ndarray]] = await asyncio.gather(*tasks)
    return answers


def test_no_request_is_lost_when_a_replica_dies(example: ModuleType) -> None:
    handle = serve.run(example.app)
    reference = onnxruntime.InferenceSession(os.environ["MODEL"], providers=["CPUExecutionProvider"])
    rows = np.repeat(np.arange(REQUESTS, dtype=np.float32)[:, None], 8, axis=1)
    (expected,) = reference.run(None, {"x0": rows})
    before = set(replica_processes())
    assert len(before) == 2
    answers = asyncio.run(load(example, handle, None))
    assert {rank for rank, _ in answers} == {0, 1}, "both replicas answer"
    answers = asyncio.run(load(example, handle, min(before)))
    np.testing.assert_allclose([row for _, row in answers], expected, rtol=1e-3, atol=1e-3)
    until = time.monotonic() + 120
    while len(set(replica_processes()) - {min(before)}) < 2:
        assert time.monotonic() < until, "the dead replica was not replaced"
        time.sleep(1)
    answers = asyncio.run(load(example, handle, None))
    assert {rank for rank, _ in answers} == {0, 1}
