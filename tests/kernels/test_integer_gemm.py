"""Integer GEMM and convolution on tensor cores: exact accumulators, and ONNX Runtime's results."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

from contributed import Array, weight_codes
from kernel_harness import run_model
from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.ep.device.open_device import OpenDevice
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.program.analysis.program_text import ProgramText
from ort_cuda_plugin.program.lowering.context import DeviceProperties
from team_choice import use_team
from test_mma_gemm import GPU, SMALL_GPU, kernels


def codes(shape: Sequence[int], dtype: str, seed: int) -> Array:
    info = np.iinfo(dtype)
    return np.random.default_rng(seed).integers(info.min, info.max + 1, shape).astype(dtype)


class Model:
    """Builds an ONNX model node by node; its methods take and return names of values."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def constant(self, array: Any) -> str:
        self.constants.append(numpy_helper.from_array(np.asarray(array), f"c{len(self.constants)}"))
        return str(self.constants[-1].name)

    def node(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op_type, inputs, [f"v{len(self.nodes)}"], **attributes))
        return str(self.nodes[-1].output[0])

    def weights(self, w: Array, axis: int, seed: int = 7, zero: int = 0) -> str:
        """Return ``w`` dequantized, with a scale for each index along ``axis``."""
        scales = np.random.default_rng(seed).uniform(0.001, 0.02, w.shape[axis]).astype(np.float32)
        zeros = np.full(w.shape[axis], zero, w.dtype)
        given = [self.constant(x) for x in (w, scales, zeros)]
        return self.node("DequantizeLinear", *given, axis=axis)

    def operands(self, shape: Sequence[int], dtype: str, columns: int) -> tuple[Array, str, str]:
        """Return codes for the input x, the name of x dequantized, and that of a bias with ``columns`` elements."""
        zero = np.array(-5 if dtype == "int8" else 131, dtype)
        given = self.node("DequantizeLinear", "x", self.constant(np.float32(0.03)), self.constant(zero))
        bias = self.constant(np.random.default_rng(3).normal(0, 1, columns).astype(np.float32))
        return codes(shape, dtype, 1), given, bias

    def quantized(self, x: str, scale: float, zero: Any) -> tuple[str, str]:
        """Return x as codes, and these dequantized."""
        given = self.constant(np.float32(scale)), self.constant(zero)
        code = self.node("QuantizeLinear", x, *given)
        return code, self.node("DequantizeLinear", code, *given)

    def proto(self, inputs: dict[str, Array], outputs: Sequence[str], opset: int = 17) -> onnx.ModelProto:
        infos = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
            for name, x in inputs.items()
        ]
        graph = helper.make_graph(
            self.nodes, "q", infos, [helper.make_empty_tensor_value_info(y) for y in outputs], self.constants
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def by_onnx_runtime(model: onnx.ModelProto, inputs: dict[str, Array]) -> list[Array]:
    """Return the CPU provider's results without graph optimization: dequantization, then float32 GEMMs."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    model = onnx.shape_inference.infer_shapes(model)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [np.asarray(y) for y in session.run(None, inputs)]


def is_near(actual: Array, expected: Array) -> None:
    """Assert that few codes differ, each by one step, or that floats are as close as float32 sums."""
    if actual.dtype.kind == "f":
        np.testing.assert_allclose(actual, expected, 1e-5, 1e-5 * np.abs(expected).max())
        return
    apart = np.abs(actual.astype(np.int32) - expected)
    assert apart.max(initial=0) <= 1
    assert (apart != 0).mean() < 0.01


def checked(model: onnx.ModelProto, inputs: dict[str, Array], kernel: str, device: DeviceProperties) -> list[Array]:
    names = [spec.name for spec in kernels(model, device)]
    assert any(re.match(kernel, name) for name in names), names
    actual = run_model(model, list(inputs.values()))
    for one, expected in zip(actual, by_onnx_runtime(model, inputs), strict=True):
        assert one.dtype == expected.dtype
        is_near(one, expected)
    return actual


CONVOLUTIONS = [
    pytest.param((2, 32, 9, 11), (20, 32, 3, 3), {"pads": [1, 1, 1, 1]}, GPU, "", id="padded"),
    pytest.param((1, 16, 10, 7), (72, 16, 1, 1), {}, GPU, "", id="single elements"),
    pytest.param((2, 48, 9, 9), (33, 48, 1, 1), {"strides": [2, 3]}, GPU, "", id="with steps"),
    pytest.param((1, 96, 8, 9), (60, 32, 3, 2), {"group": 3, "pads": [0, 1, 2, 0]}, GPU, "", id="groups"),
    pytest.param((1, 64, 30), (24, 64, 5), {"dilations": [3], "pads": [4, 7]}, GPU, "", id="lines"),
    pytest.param((1, 256, 5, 6), (24, 256, 3, 3), {}, GPU, "split_", id="in parts of k"),
    pytest.param((3, 80, 8, 9), (70, 80, 3, 3), {"pads": [1] * 4}, SMALL_GPU, "", id="large tiles"),
]


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize(("image", "weights", "attributes", "device", "split"), CONVOLUTIONS)
def test_convolutions_of_dequantized_bytes(
    monkeypatch: pytest.MonkeyPatch,
    image: tuple[int, ...],
    weights: tuple[int, ...],
    attributes: dict[str, Any],
    device: DeviceProperties,
    split: str,
    dtype: str,
) -> None:
    """The epilogue has a bias, Relu and quantization. Padding is x's zero point; weights have a scale per channel."""
    monkeypatch.setattr(OpenDevice, "properties", lambda self: device)
    if split:
        use_team(monkeypatch, None)
    m = Model()
    x, given, bias = m.operands(image, dtype, weights[0])
    y = m.node("Relu", m.node("Conv", given, m.weights(codes(weights, "int8", 2), 0), bias, **attributes))
    code, _ = m.quantized(y, 0.05, np.array(3, dtype))
    checked(m.proto({"x": x}, [code, y]), {"x": x}, rf"conv[0-3]d_mma_{split}.*_{dtype[0]}8$", device)


def block(m: Model, x: str, width: int, seed: int, shared: bool) -> str:
    """Return three convolutions and a residual: x itself or, if ``shared``, the codes of the first convolution."""
    w = [
        codes(shape, "int8", seed + i) for i, shape in enumerate(((16, width, 1, 1), (16, 16, 3, 3), (width, 16, 1, 1)))
    ]
    y = x
    for number, one in enumerate(w):
        _, given = m.quantized(y, 0.02, np.uint8(0))
        x = given if shared and number == 0 else x
        pads = {"pads": [one.shape[2] // 2] * 4}
        y = m.node("Conv", given, m.weights(one, 0, seed), m.constant(np.ones(one.shape[0], np.float32)), **pads)
        y = m.node("Relu", y) if number < 2 else y
    return m.node("Relu", m.node("Add", y, x))


@pytest.mark.parametrize("shared", [False, True])
def test_tensors_between_convolutions_are_bytes(monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    """Each convolution reads codes, and its epilogue quantizes the next one's; no other steps lie between them."""
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    m = Model()
    x = np.random.default_rng(0).normal(1, 1, (2, 64, 6, 7)).astype(np.float32)
    y = m.node("GlobalAveragePool", block(m, block(m, "x", 64, 10, shared), 64, 20, shared))
    model = m.proto({"x": x}, [y])
    (actual,) = run_model(model, [x])
    (expected,) = by_onnx_runtime(model, {"x": x})
    # A code that is off by one step shifts all values computed from it.
    np.testing.assert_allclose(actual, expected, 0.02, 0.02 * np.abs(expected).max())
    program: list[str] = []
    compiled = CompiledCluster(read_model(model), GPU)
    compiled.watch = lambda name, steps: program.append(ProgramText(["x"], ["y"]).program(name, steps))
    compiled.prepare()
    rest = next(text for text in program if text.startswith("after constant_folding"))
    convolutions = [line for line in rest.splitlines() if "d_mma_" in line]
    assert len(convolutions) == 6
    assert all("u8[" in line.split("<-")[1] and "i8[" in line.split("<-")[1] for line in convolutions), rest
    assert "operands, exact sums" in rest
    # If shared, the first block's result is stored as codes only, which are also the second block's residual.
    assert sum("f32[" in line.split("<-")[0] for line in convolutions) == (1 if shared else 2), rest


def test_weights_of_uint8_are_int8_without_their_zero_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    m = Model()
    x = codes((1, 32, 6, 6), "uint8", 1)
    given = m.node("DequantizeLinear", "x", m.constant(np.float32(0.03)), m.constant(np.uint8(120)))
    y = m.node("Conv", given, m.weights(codes((24, 32, 3, 3), "uint8", 2), 0, zero=128), pads=[1] * 4)
    checked(m.proto({"x": x}, [y]), {"x": x}, r"conv2d_mma_.*_u8$", GPU)


@pytest.mark.parametrize(
    ("weights", "zero", "scale"),
    [("uint8", 100, np.float32(0.1)), ("int8", 3, np.float32(0.1)), ("int8", 0, np.full(32, 0.1, np.float32))],
    ids=["uint8 beyond int8", "int8 with a zero point", "a scale for each channel of the image"],
)
def test_what_is_no_sum_of_integers_is_dequantized(
    monkeypatch: pytest.MonkeyPatch, weights: str, zero: int, scale: Array
) -> None:
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    m = Model()
    x = codes((1, 32, 6, 6), "uint8", 1)
    zeros = np.full(scale.shape, 120, np.uint8)
    given = m.node("DequantizeLinear", "x", m.constant(scale), m.constant(zeros), axis=1)
    y = m.node("Conv", given, m.weights(codes((24, 32, 3, 3), weights, 2), 0, zero=zero), pads=[1] * 4)
    model = m.proto({"x": x}, [y])
    assert not any("_mma_" in spec.name for spec in kernels(model, replace(GPU, tf32=False)))
    monkeypatch.setattr(OpenDevice, "properties", lambda self: replace(GPU, tf32=False))
    is_near(run_model(model, [x])[0], by_onnx_runtime(model, {"x": x})[0])


@pytest.mark.parametrize("dynamic", [False, True])
def test_conv_integer_and_qlinear_conv_are_exact(monkeypatch: pytest.MonkeyPatch, dynamic: bool) -> None:
    """The zero point, which is also the padding's value, is a runtime input."""
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    x, w, zero = codes((1, 32, 7, 6), "uint8", 1), weight_codes(20, 32, 3, 3, seed=2), np.uint8(77)
    m = Model()
    total = m.node("ConvInteger", "x", m.constant(w), "zero", pads=[1] * 4)
    scales = [m.constant(np.float32(scale)) for scale in (0.02, 0.01, 0.3)]
    given = ["x", scales[0], "zero", m.constant(w), scales[1], m.constant(np.int8(0)), scales[2], m.constant(zero)]
    code = m.node("QLinearConv", *given, m.constant(np.arange(20, dtype=np.int32) * 500), pads=[1] * 4)
    inputs = {"x": x, "zero": np.asarray(zero)}
    model = m.proto(inputs, [total, code])
    names = [spec.name for spec in kernels(model)]
    assert sum(bool(re.match(r"conv2d_mma_.*_u8$", name)) for name in names) >= 1, names
    actual = run_model(model, list(inputs.values()), dynamic)
    expected = by_onnx_runtime(model, inputs)
    np.testing.assert_array_equal(actual[0], expected[0])
    is_near(actual[1], expected[1])


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize(
    ("a", "b", "device", "split"),
    [
        pytest.param((40, 96), (96, 75), GPU, "", id="one matrix"),
        pytest.param((2, 3, 9, 64), (64, 33), GPU, "", id="batches"),
        pytest.param((20, 2064), (2064, 72), GPU, "split_", id="in parts of k"),
        pytest.param((136, 80), (80, 72), SMALL_GPU, "", id="large tiles"),
    ],
)
def test_products_of_dequantized_bytes(
    monkeypatch: pytest.MonkeyPatch,
    a: tuple[int, ...],
    b: tuple[int, ...],
    device: DeviceProperties,
    split: str,
    dtype: str,
) -> None:
    """The epilogue has a bias and a scale per column; the model returns codes and floats."""
    monkeypatch.setattr(OpenDevice, "properties", lambda self: device)
    if split:
        use_team(monkeypatch, None)
    m = Model()
    x, given, bias = m.operands(a, dtype, b[1])
    y = m.node("Add", bias, m.node("MatMul", given, m.weights(codes(b, "int8", 2), 1)))
    code, _ = m.quantized(y, 0.2, np.array(3, dtype))
    checked(m.proto({"x": x}, [code, y]), {"x": x}, rf"matmul_mma_{split}.*{dtype[0]}8(_i8)?$", device)


def test_gemm_with_transposed_weights_and_qlinear_matmul(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    m = Model()
    x, w = codes((24, 32), "uint8", 1), weight_codes(40, 32, seed=2)
    scale, zero = m.constant(np.float32(0.03)), m.constant(np.uint8(100))
    given = m.node("DequantizeLinear", "x", scale, zero)
    y = m.node("Gemm", given, m.weights(w, 0), m.constant(np.arange(40, dtype=np.float32)), transB=1)
    known = m.constant(np.ascontiguousarray(w.T)), m.constant(np.float32(0.01)), m.constant(np.int8(0))
    code = m.node("QLinearMatMul", "x", scale, zero, *known, m.constant(np.float32(0.5)), m.constant(np.uint8(90)))
    checked(m.proto({"x": x}, [y, code]), {"x": x}, r"matmul_mma_.*u8_i8$", GPU)


@pytest.mark.parametrize("rows", [1, 3, 24])
def test_matmul_integer_with_a_zero_point_of_the_run(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Up to 4 rows use the GEMV kernel."""
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    m = Model()
    inputs = {"x": codes((rows, 64), "uint8", 1), "zero": np.asarray(np.uint8(99))}
    total = m.node("MatMulInteger", "x", m.constant(weight_codes(64, 40, seed=2)), "zero", m.constant(np.int8(0)))
    y = m.node("Mul", m.node("Cast", total, to=1), m.constant(np.float32(0.01)))
    model = m.proto(inputs, [total, y])
    names = [spec.name for spec in kernels(model)]
    assert any(re.match(r"matmul_mma_.*u8_i8$", name) for name in names) == (rows > 4), names
    actual = run_model(model, list(inputs.values()), dynamic=True)
    for one, expected in zip(actual, by_onnx_runtime(model, inputs), strict=True):
        np.testing.assert_array_equal(one, expected)
