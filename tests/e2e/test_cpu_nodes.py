"""Models whose middle runs on the CPU provider: the Memcpy kernels and the waits between the two."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from onnx import helper

import ort_cuda_plugin
from device_models import with_cpu_nodes

DTYPES = [
    "float32",
    "float64",
    "float16",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
]


def providers_of(session: ort.InferenceSession) -> list[str]:
    return [part.ep_name for part in session.get_provider_graph_assignment_info()]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_goes_down_to_a_cpu_node_and_up_again(dtype: str) -> None:
    model = with_cpu_nodes(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
    session = ort_cuda_plugin.session(model, emulate=True)
    assert providers_of(session).count(ort_cuda_plugin.get_ep_name()) == 2
    assert "CPUExecutionProvider" in providers_of(session)
    x = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 100, (3, 4)).astype(dtype)
    before = ort_cuda_plugin.counters()
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], np.tile(x, (4, 1)))
    after = ort_cuda_plugin.counters()
    # Input and output of the model, and the way down and up in its middle.
    assert after["copies_h2d"] - before["copies_h2d"] == 2
    assert after["copies_d2h"] - before["copies_d2h"] == 2
    assert after["device_bytes_in_use"] == before["device_bytes_in_use"]


@pytest.mark.parametrize(
    "level", [ort.GraphOptimizationLevel.ORT_DISABLE_ALL, ort.GraphOptimizationLevel.ORT_ENABLE_ALL]
)
def test_many_changes_between_device_and_host_give_right_results(level: ort.GraphOptimizationLevel) -> None:
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    session = ort_cuda_plugin.session(with_cpu_nodes(1, rounds=5), emulate=True, sess_options=options)
    rng = np.random.default_rng(1)
    for rows, columns in [(1, 1), (30, 20), (5, 100), (30, 20)]:
        x = rng.integers(-1000, 1000, (rows, columns)).astype(np.float32)
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], np.tile(x, (64, 1)))
    assert ort_cuda_plugin.counters()["pinned_bytes_in_use"] == 0
