"""Memory statistics of sessions: shared weights, slabs of plans, peaks of live tensors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import ort_cuda_plugin
from isolated import ROOT, python

CODE = """
import sys, numpy as np, ort_cuda_plugin as plugin
from ort_cuda_plugin.ep import boundary
model = sys.argv[1]
def stats():
    return plugin.memory_stats()["device"]
first = plugin.session(model, emulate=True, provider_options={"automatic_cuda_graphs": 0})
assert stats()["Weights"] == 256 * 1024 == stats()["InUse"] and stats()["NumReserves"] == 1, stats()
second = plugin.session(model, emulate=True)
assert stats()["Weights"] == 256 * 1024 and stats()["NumReserves"] == 1, stats()
x = np.ones((512, 256), np.float32)
first.run(None, {"x": x})
fused, _ = [provider.fused_nodes[0] for provider in boundary.PROVIDERS.values()]
planned, alive = fused.plan_memory()
# Softmax and MatMul in turn: two tensors of 512 KiB are alive at once, and the slab is no larger.
assert (planned, alive) == (1 << 20, 1 << 20), (planned, alive)
# Input and output of 512 KiB each stay to the end.
assert stats()["MaxInUse"] == (256 << 10) + (2 << 20), stats()
del first, second, fused
plugin.unregister()
plugin.register(emulate=True)
assert stats()["Weights"] == stats()["TotalAllocated"] == 0, stats()
"""


def test_weights_are_counted_once_and_slabs_as_planned(tmp_path: Path) -> None:
    weight = numpy_helper.from_array(np.full((256, 256), 1 / 256, np.float32), "w")
    names = ["x", "a", "b", "c", "d", "y"]
    nodes = [
        helper.make_node("Softmax", [names[i]], [names[i + 1]], axis=1)
        if i % 2 == 0
        else helper.make_node("MatMul", [names[i], "w"], [names[i + 1]])
        for i in range(5)
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 256]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, tmp_path / "model.onnx")
    python(
        CODE,
        str(tmp_path / "model.onnx"),
        env={"CUDA_VISIBLE_DEVICES": "", "ORT_CUDA_PLUGIN_EMULATE": "1"},
        preloaded=True,
    )


def test_the_benchmark_tells_of_a_model() -> None:
    command = [sys.executable, str(ROOT / "bench" / "memory.py"), "light_squeezenet", "--one"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=600)
    mib = json.loads(done.stdout.splitlines()[-1])
    assert 4 < mib["weights"] < 6
    assert mib["alive at once"] <= mib["planned"] < 1.1 * mib["alive at once"]
    assert mib["weights"] + mib["planned"] < mib["peak in use"] <= mib["peak held"]
    assert mib["peak held"] < 1.1 * (mib["weights"] + mib["planned"] + mib["in and out"])
    assert mib["compulsory"] <= mib["our kernels"] <= 1.01 * mib["compulsory"]


@pytest.fixture
def device() -> Iterator[Any]:
    """Register the emulated device, and restore its memory limit afterwards."""
    (found,) = (d for d in ort_cuda_plugin.register(emulate=True) if d.ep_metadata.get("emulated") == "1")
    yield found
    ort_cuda_plugin.set_limit(found, None)


def test_functions_of_memory_take_what_register_returns(device: Any) -> None:
    (info,) = (info for info in ort_cuda_plugin.devices() if info.emulated)
    ort_cuda_plugin.set_limit(device, 1 << 30)
    stats = ort_cuda_plugin.memory_stats(device)
    assert stats == ort_cuda_plugin.memory_stats(info)
    assert stats["device"]["Limit"] == 1 << 30
    assert ort_cuda_plugin.trim(device) >= 0
    (other,) = (d for d in ort.get_ep_devices() if d.ep_name == "CPUExecutionProvider")
    with pytest.raises(ValueError, match=r"ort_cuda_plugin\.register returns, got a device of CPUExecutionProvider"):
        ort_cuda_plugin.memory_stats(other)


@pytest.mark.parametrize(
    ("limit", "means"),
    [("1G", 1 << 30), ("96m", 96 << 20), ("4096", 4096), (4096, 4096), (0, 2**63 - 1), ("0", 2**63 - 1)],
)
def test_a_limit_is_written_as_the_option_is(device: Any, limit: int | str, means: int) -> None:
    ort_cuda_plugin.set_limit(device, limit)
    assert ort_cuda_plugin.memory_stats(device)["device"]["Limit"] == means


@pytest.mark.parametrize("limit", [-1, "-1", "1T", "much", "", 1.5, "99999999999G"])
def test_what_is_no_limit_is_refused(device: Any, limit: Any) -> None:
    with pytest.raises(ValueError, match=rf"nbytes={re.escape(repr(limit))}: use a number of bytes such as"):
        ort_cuda_plugin.set_limit(device, limit)
