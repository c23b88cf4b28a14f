"""Test scenarios of ONNX Runtime's own CUDA plugin, under the names that they have in its test script.

They bind inputs to the device "cuda". Without a GPU this is the emulated device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import NodeProto, TensorProto, helper

import ort_cuda_plugin
from isolated import python

NAME = "CudaPluginExecutionProvider"
ADD = [helper.make_node("Add", ["A", "B"], ["Y"])]
MATMUL = [helper.make_node("MatMul", ["A", "B"], ["Y"])]
Shapes = dict[str, Sequence[int | str]]


def model(nodes: Sequence[NodeProto], inputs: Shapes, outputs: Shapes) -> bytes:
    def values(shapes: Shapes) -> list[onnx.ValueInfoProto]:
        return [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]

    graph = helper.make_graph(nodes, "scenario", values(inputs), values(outputs))
    return bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8).SerializeToString()
    )


def add_model() -> bytes:
    return model(ADD, {"A": [3, 2], "B": [3, 2]}, {"Y": [3, 2]})


def matmul_model() -> bytes:
    return model(MATMUL, {"A": [3, 4], "B": [4, 5]}, {"Y": [3, 5]})


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).random(shape, dtype=np.float32)


def options(**entries: str) -> ort.SessionOptions:
    made = ort.SessionOptions()
    made.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    for key, value in entries.items():
        made.add_session_config_entry(key.replace("__", "."), value)
    return made


def by_name(source: bytes, sess_options: ort.SessionOptions | None = None, **provider: str) -> ort.InferenceSession:
    ort_cuda_plugin.register(emulate=True)
    providers = [(NAME, provider), "CPUExecutionProvider"]
    return ort.InferenceSession(source, sess_options=sess_options or options(), providers=providers)


def op_types(session: ort.InferenceSession) -> list[str]:
    parts = session.get_provider_graph_assignment_info()
    return [node.op_type for part in parts if part.ep_name == NAME for node in part.get_nodes()]


def test_provider_options_valid() -> None:
    session = by_name(add_model(), device_id="0", use_tf32="0")
    assert op_types(session) == ["Add"]
    a, b = random(3, 2), random(3, 2) + 1
    np.testing.assert_array_equal(session.run(None, {"A": a, "B": b})[0], a + b)


def test_provider_options_invalid_device() -> None:
    session = by_name(add_model(), device_id="999")  # without the device, ORT uses the CPU provider
    assert op_types(session) == []
    with pytest.raises(RuntimeError, match="there is no device 999"):
        ort_cuda_plugin.session(add_model(), emulate=True, provider_options={"device_id": 999})


def test_provider_options_second_device() -> None:
    code = """
    import sys, numpy as np, onnxruntime as ort, ort_cuda_plugin
    ort_cuda_plugin.register(emulate=True)
    name = ort_cuda_plugin.get_ep_name()
    session = ort.InferenceSession(bytes.fromhex(sys.argv[1]), providers=[(name, {"device_id": "1"})])
    assert session.get_provider_options()[name]["device_id"] == "1"
    a, b = np.ones((3, 2), np.float32), np.full((3, 2), 2, np.float32)
    np.testing.assert_array_equal(session.run(None, {"A": a, "B": b})[0], a + b)
    (device,) = [made for made in ort.get_ep_devices() if made.ep_options.get("device_id") == "1"]
    assert device.ep_metadata["cuda_device_id"] == "1"
    """
    python(
        code,
        add_model().hex(),
        env={"ORT_CUDA_PLUGIN_EMULATE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": ""},
        preloaded=True,
    )


@pytest.mark.parametrize("prefix", ["ep.cuda.", "ep.cudapluginexecutionprovider."])
def test_nhwc_conv(prefix: str) -> None:
    nodes = [helper.make_node("Conv", ["X", "W"], ["Y"], pads=[1, 1, 1, 1])]
    source = model(nodes, {"X": [1, 2, 4, 4], "W": [3, 2, 3, 3]}, {"Y": [1, 3, 4, 4]})
    asked = options(**{f"{prefix}prefer_nhwc_layout": "1"})
    session = by_name(source, asked)
    assert sorted(op_types(session)) == ["Conv", "Transpose", "Transpose"]
    (part,) = session.get_provider_graph_assignment_info()
    assert {node.op_type: node.domain for node in part.get_nodes()}["Conv"] == "com.ms.internal.nhwc"
    feeds = {"X": random(1, 2, 4, 4), "W": random(3, 2, 3, 3)}
    expected = ort.InferenceSession(source, providers=["CPUExecutionProvider"]).run(None, feeds)[0]
    np.testing.assert_allclose(session.run(None, feeds)[0], expected, rtol=1e-5, atol=1e-6)


def check_memcpy(nodes: Sequence[NodeProto]) -> None:
    source = model(nodes, {"X": [3, 4]}, {"Y": [3, 4]})
    x = random(3, 4) - 0.5
    np.testing.assert_array_equal(by_name(source).run(None, {"X": x})[0], np.maximum(x, 0))


def test_memcpy_from_host_explicit() -> None:
    check_memcpy(
        [helper.make_node("MemcpyFromHost", ["X"], ["on_device"]), helper.make_node("Relu", ["on_device"], ["Y"])]
    )


def test_memcpy_to_host_explicit() -> None:
    check_memcpy(
        [helper.make_node("Relu", ["X"], ["on_device"]), helper.make_node("MemcpyToHost", ["on_device"], ["Y"])]
    )


def test_memcpy_roundtrip_explicit() -> None:
    check_memcpy(
        [
            helper.make_node("MemcpyFromHost", ["X"], ["on_device"]),
            helper.make_node("Relu", ["on_device"], ["result"]),
            helper.make_node("MemcpyToHost", ["result"], ["Y"]),
        ]
    )


def check_iobinding(source: bytes, a: np.ndarray, b: np.ndarray, expected: np.ndarray) -> None:
    session = by_name(source)
    before = ort_cuda_plugin.counters()
    binding = session.io_binding()
    binding.bind_cpu_input("A", a)
    binding.bind_cpu_input("B", b)
    binding.bind_output("Y", "cuda", 0)
    binding.synchronize_inputs()
    session.run_with_iobinding(binding)
    assert binding.get_outputs()[0].device_name() == "cuda"
    np.testing.assert_allclose(binding.copy_outputs_to_cpu()[0], expected, rtol=1e-6)
    after = ort_cuda_plugin.counters()
    assert after["copies_h2d"] - before["copies_h2d"] == 2
    assert after["copies_d2h"] - before["copies_d2h"] == 1


def test_iobinding_add() -> None:
    a, b = random(3, 2), random(3, 2) + 1
    check_iobinding(add_model(), a, b, a + b)


def test_iobinding_matmul() -> None:
    a, b = random(3, 4), random(4, 5)
    check_iobinding(matmul_model(), a, b, a @ b)


def test_iobinding_with_preallocated_values_on_the_device() -> None:
    session = by_name(matmul_model())
    binding = session.io_binding()
    a, b = random(3, 4), random(4, 5)
    values = {"A": a, "B": b}
    for name, array in values.items():
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array, "cuda", 0))
    result = ort.OrtValue.ortvalue_from_shape_and_type([3, 5], np.float32, "cuda", 0)
    binding.bind_ortvalue_output("Y", result)
    session.run_with_iobinding(binding)
    np.testing.assert_allclose(result.numpy(), a @ b, rtol=1e-6)
    second = ort.OrtValue.ortvalue_from_shape_and_type([3, 5], np.float32, "cuda", 0)
    ort.copy_tensors([result], [second])
    np.testing.assert_array_equal(second.numpy(), result.numpy())


def test_values_pass_through_the_dlpack_of_onnx_runtime() -> None:
    session = by_name(add_model())
    a = random(3, 2)
    on_device = ort.OrtValue.ortvalue_from_numpy(a, "cuda", 0)
    shared = ort.OrtValue.from_dlpack(on_device)
    assert shared.data_ptr() == on_device.data_ptr()
    (y,) = session.run_with_ort_values(None, {"A": shared, "B": on_device})
    np.testing.assert_array_equal(y.numpy(), a + a)
