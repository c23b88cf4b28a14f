"""The emulated device executes the PTX of the plugin's own kernels (``ORT_CUDA_PLUGIN_EMULATE_LOWERING=sm_90:ptx``)."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import ort_cuda_plugin
from ort_cuda_plugin.compiler.targets import Target
from ort_cuda_plugin.ep.device.devices import LOWERING_VARIABLE, emulated_properties, executed_ptx

rng = np.random.default_rng(3)


Arrays: TypeAlias = "dict[str, npt.NDArray[Any]]"
node = helper.make_node


def model(nodes: list[onnx.NodeProto], inputs: Arrays, constants: Arrays, output: int) -> bytes:
    given = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in inputs.items()
    ]
    result = helper.make_tensor_value_info("y", output, None)
    weights = [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "g", given, [result], weights)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())


def array(*shape: int, dtype: type = np.float32) -> npt.NDArray[Any]:
    return rng.standard_normal(shape).astype(dtype)


PRODUCT = [node("MatMul", ["x", "w"], ["y"])]
CASES: dict[str, tuple[list[onnx.NodeProto], Arrays, Arrays]] = {
    "map": (
        [node("Gelu", ["x"], ["g"], domain="com.microsoft"), node("Add", ["g", "b"], ["y"])],
        {"x": array(7, 33), "b": array(33)},
        {},
    ),
    "softmax": ([node("Softmax", ["x"], ["y"], axis=-1)], {"x": array(9, 300)}, {}),
    "product": (PRODUCT, {"x": array(70, 96)}, {"w": array(96, 80)}),
    "half product": (PRODUCT, {"x": array(64, 64, dtype=np.float16)}, {"w": array(64, 72, dtype=np.float16)}),
    "half vector": (PRODUCT, {"x": array(1, 64, dtype=np.float16)}, {"w": array(64, 72, dtype=np.float16)}),
    "convolution": (
        [node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])],
        {"x": array(1, 16, 14, 14)},
        {"w": array(24, 16, 3, 3)},
    ),
    "scan": ([node("CumSum", ["x", "axis"], ["y"])], {"x": np.round(array(5, 700) * 8)}, {"axis": np.array(1)}),
    "top": ([node("TopK", ["x", "k"], ["y", "i"], axis=1)], {"x": array(4, 200)}, {"k": np.array([7])}),
}
"""Models by name: nodes, inputs and constants. The output y has the element type of x."""


@pytest.fixture(params=["sm_80", "sm_90", "sm_120"])
def lowering(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(LOWERING_VARIABLE, f"{request.param}:ptx")
    return str(request.param)


@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_the_cpu_provider(lowering: str, case: str) -> None:
    nodes, inputs, constants = CASES[case]
    dtype = inputs["x"].dtype
    data = model(nodes, inputs, constants, helper.np_dtype_to_tensor_dtype(dtype))
    expected = ort.InferenceSession(data, providers=["CPUExecutionProvider"]).run(["y"], inputs)[0]
    session = ort_cuda_plugin.session(data, emulate=True)
    tolerance = 2e-2 if dtype == np.float16 else 1e-5
    np.testing.assert_allclose(session.run(["y"], inputs)[0], expected, rtol=tolerance, atol=tolerance)


def test_a_search_over_a_power_of_two_ends(lowering: str) -> None:
    """Kernels from PTX use libdevice's log2, which is just below 3 for 8; kernels from LLVM IR call an exact log2."""
    draw = node("Multinomial", ["x"], ["y"], sample_size=160, dtype=TensorProto.INT64, seed=3.0)
    inputs = {"x": np.zeros((1, 8), np.float32)}
    session = ort_cuda_plugin.session(model([draw], inputs, {}, TensorProto.INT64), emulate=True)
    assert set(np.unique(session.run(["y"], inputs)[0])) == set(range(8))


def test_the_variable_names_a_gpu_and_what_is_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOWERING_VARIABLE, "sm_90:132:ptx")
    assert executed_ptx() == (9, 0)
    assert emulated_properties().multiprocessors == 132
    monkeypatch.setenv(LOWERING_VARIABLE, "sm_90")
    assert executed_ptx() == (0, 0)
    monkeypatch.setenv(LOWERING_VARIABLE, "ptx")
    with pytest.raises(ValueError, match=r"expected a GPU such as sm_90, sm_90:132 .*sm_90:ptx"):
        emulated_properties()


def test_kernels_from_ptx_have_their_own_cache_entries() -> None:
    assert Target.emulated(ptx=(9, 0)).arch == "emulated_ptx_sm_90"
    assert Target.emulated(check=True, ptx=(8, 0)).arch == "emulated_check_ptx_sm_80"
    assert not Target.cuda(9, 0).executes_ptx
