"""Implicit-GEMM convolution on tensor cores: results on the emulated device, and machine code for GPUs."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from contributed import Array, noise
from kernel_harness import make_model, run_model, run_op
from ort_cuda_plugin.compiler.targets import Target
from ort_cuda_plugin.ep.device.open_device import OpenDevice
from ort_cuda_plugin.estimate import sass
from ort_cuda_plugin.estimate.count import count_all
from ort_cuda_plugin.estimate.gather import work_of_model
from ort_cuda_plugin.estimate.work import KernelStep
from ort_cuda_plugin.program.lowering.context import DeviceProperties
from test_mma_gemm import GPU, SMALL_GPU, kernels


def expected(x: Array, w: Array, b: Array, attributes: dict[str, Any], op_type: str = "Conv") -> Array:
    """Return the result of ONNX Runtime's CPU provider for the same numbers in float32."""
    given = [each.astype(np.float32) for each in (x, w, b)]
    model = make_model(op_type, given, attributes)
    model.ir_version = 10  # a version that ONNX Runtime supports
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    (result,) = session.run(None, dict(zip(names, given, strict=True)))
    return np.asarray(result)


@pytest.mark.parametrize(
    ("image", "weights", "attributes", "dtype", "device"),
    [
        pytest.param((2, 24, 9, 11), (20, 24, 3, 3), {"pads": [1, 1, 1, 1]}, np.float16, GPU, id="padded"),
        pytest.param((1, 16, 10, 7), (72, 16, 1, 1), {}, np.float16, GPU, id="single elements"),
        pytest.param((2, 8, 9, 9), (9, 8, 1, 1), {"strides": [2, 3]}, np.float16, GPU, id="with steps"),
        pytest.param((1, 3, 17, 18), (10, 3, 7, 7), {"pads": [3] * 4, "strides": [2, 2]}, np.float16, GPU, id="colors"),
        pytest.param((1, 48, 8, 9), (42, 16, 3, 2), {"group": 3, "pads": [0, 1, 2, 0]}, np.float16, GPU, id="groups"),
        pytest.param((1, 40, 30), (12, 40, 5), {"dilations": [3], "pads": [4, 7]}, np.float16, GPU, id="lines"),
        pytest.param((1, 8, 4, 5, 6), (8, 8, 2, 3, 2), {"strides": [1, 2, 1]}, np.float16, GPU, id="volumes"),
        pytest.param((1, 128, 5, 6), (24, 128, 3, 3), {}, ml_dtypes.bfloat16, GPU, id="in parts of k"),
        pytest.param((3, 72, 8, 9), (70, 72, 3, 3), {"pads": [1] * 4}, np.float16, SMALL_GPU, id="large tiles"),
    ],
)
def test_convolutions_of_halves(
    monkeypatch: pytest.MonkeyPatch,
    image: tuple[int, ...],
    weights: tuple[int, ...],
    attributes: dict[str, Any],
    dtype: Any,
    device: DeviceProperties,
) -> None:
    x, w, b = (noise(*shape, seed=i, scale=0.5).astype(dtype) for i, shape in enumerate((image, weights, weights[:1])))
    monkeypatch.setattr(OpenDevice, "properties", lambda self: device)
    names = [spec.name for spec in kernels(make_model("Conv", [x, w, b], attributes), device)]
    assert any(re.match(r"conv[0-3]d_mma_", name) for name in names), names
    (actual,) = run_op("Conv", [x, w, b], attributes)
    if dtype is not np.float16:
        actual = actual.view(dtype)
    tolerance = 2e-3 if dtype is np.float16 else 1.6e-2
    np.testing.assert_allclose(actual.astype(np.float32), expected(x, w, b, attributes), tolerance, tolerance)


TF32 = DeviceProperties.gpu((9, 0))


@pytest.mark.parametrize(
    ("image", "weights", "attributes", "device"),
    [
        pytest.param((2, 20, 9, 11), (24, 20, 3, 3), {"pads": [1, 1, 1, 1]}, TF32, id="padded"),
        pytest.param((1, 3, 17, 18), (10, 3, 5, 5), {"pads": [2] * 4, "strides": [2, 2]}, TF32, id="colors"),
        pytest.param((1, 24, 8, 9), (42, 8, 3, 2), {"group": 3, "pads": [0, 1, 2, 0]}, TF32, id="groups"),
        pytest.param((1, 64, 5, 6), (24, 64, 3, 3), {}, TF32, id="in parts of k"),
        pytest.param((3, 36, 8, 9), (70, 36, 1, 1), {}, SMALL_GPU, id="large tiles, single elements"),
    ],
)
def test_convolutions_of_float32_in_tf32(
    monkeypatch: pytest.MonkeyPatch,
    image: tuple[int, ...],
    weights: tuple[int, ...],
    attributes: dict[str, Any],
    device: DeviceProperties,
) -> None:
    x, w, b = (noise(*shape, seed=i, scale=0.5) for i, shape in enumerate((image, weights, weights[:1])))
    monkeypatch.setattr(OpenDevice, "properties", lambda self: device)
    names = [spec.name for spec in kernels(make_model("Conv", [x, w, b], attributes), device)]
    assert any(re.match(r"conv[0-3]d_mma_.*tf32", name) for name in names), names
    (actual,) = run_op("Conv", [x, w, b], attributes)
    wanted = expected(x, w, b, attributes)
    np.testing.assert_allclose(actual, wanted, 1e-3, 1e-3 * np.abs(wanted).max())
    assert not np.array_equal(actual, wanted)


@pytest.mark.parametrize(
    ("image", "weights", "attributes"),
    [
        pytest.param((2, 16, 5, 6), (16, 20, 4, 4), {"strides": [2, 2], "pads": [1] * 4}, id="overlapping"),
        pytest.param((1, 16, 5, 6), (16, 9, 3, 3), {"strides": [2, 3], "output_padding": [1, 0]}, id="unequal steps"),
        pytest.param((1, 8, 7, 4), (8, 10, 2, 2), {"strides": [3, 3]}, id="places that nothing reaches"),
        pytest.param((1, 32, 6, 5), (32, 6, 3, 4), {"group": 2, "dilations": [2, 3], "strides": [2, 2]}, id="dilated"),
        pytest.param((1, 24, 9), (24, 12, 5), {"strides": [3], "pads": [4, 2]}, id="lines"),
        pytest.param((1, 8, 3, 4, 3), (8, 8, 3, 2, 3), {"strides": [2, 1, 2], "pads": [1, 0, 2] * 2}, id="volumes"),
    ],
)
def test_transposed_convolutions_are_plain_ones(
    monkeypatch: pytest.MonkeyPatch, image: tuple[int, ...], weights: tuple[int, ...], attributes: dict[str, Any]
) -> None:
    rows = weights[1] * attributes.get("group", 1)
    x, w, b = (noise(*shape, seed=i, scale=0.5).astype(np.float16) for i, shape in enumerate((image, weights, (rows,))))
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    names = [spec.name for spec in kernels(make_model("ConvTranspose", [x, w, b], attributes))]
    assert any(re.match(r"conv[0-3]d_mma_", name) for name in names), names
    (actual,) = run_op("ConvTranspose", [x, w, b], attributes)
    wanted = expected(x, w, b, attributes, "ConvTranspose")
    np.testing.assert_allclose(actual.astype(np.float32), wanted, 2e-3, 2e-3)


def network() -> onnx.ModelProto:
    """Return a network that convolves slices of an image, and an unaligned slice of a single pixel."""
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["all"], pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("Relu", ["all"], ["image"]),
        helper.make_node("Split", ["image", "halves"], ["few", "many"], axis=1),
        helper.make_node("Conv", ["few", "w1"], ["left"], pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["many", "w2", "b2"], ["right"]),
        helper.make_node("Add", ["left", "right"], ["sum"]),
        helper.make_node("Sigmoid", ["sum"], ["activated"]),
        helper.make_node("Concat", ["activated", "image"], ["joined"], axis=1),
        helper.make_node("Conv", ["joined", "w3"], ["each"], pads=[0, 1, 0, 1], group=40),
        helper.make_node("Conv", ["each", "w4"], ["last"], auto_pad="SAME_UPPER", strides=[2, 2]),
        helper.make_node("GlobalAveragePool", ["last"], ["average"]),
        helper.make_node("Split", ["average", "parts"], ["start", "end"], axis=1),
        helper.make_node("Conv", ["end", "w5"], ["y"]),
    ]
    shapes = {"w0": (24, 3, 3, 3), "w1": (16, 8, 3, 3), "w2": (16, 16, 1, 1), "b2": (16,)}
    shapes |= {"w3": (40, 1, 1, 3), "w4": (20, 40, 3, 3), "w5": (9, 16, 1, 1)}
    weights = [
        numpy_helper.from_array(noise(*shape, seed=i, scale=0.3).astype(np.float16), name)
        for i, (name, shape) in enumerate(shapes.items())
    ]
    weights += [numpy_helper.from_array(np.array(x), name) for name, x in (("halves", [8, 16]), ("parts", [4, 16]))]
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT16, ["n", 3, "h", "w"])]
    made = [helper.make_tensor_value_info("y", TensorProto.FLOAT16, ["n", 9, 1, 1])]
    graph = helper.make_graph(nodes, "network", given, made, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_network_keeps_its_channels_last(monkeypatch: pytest.MonkeyPatch, dynamic: bool) -> None:
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    model, x = network(), noise(1, 3, 18, 15).astype(np.float16)
    if not dynamic:
        for dim, size in zip(model.graph.input[0].type.tensor_type.shape.dim, x.shape, strict=True):
            dim.dim_value = size
    names = [spec.name for spec in kernels(model) if re.match(r"conv\dd_", spec.name)]
    forms = {re.sub(r"_teams.*_", "_", name) for name in names}
    assert forms == {"conv2d_mma_f16", "conv0d_mma_f16"}, names  # sliding windows, and pointwise
    assert all("d_mma_" in name for name in names), names
    (actual,) = run_model(model, [x], dynamic)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (wanted,) = session.run(None, {"x": x})
    np.testing.assert_allclose(actual.astype(np.float32), np.asarray(wanted, np.float32), 1e-2, 1e-2)


def test_convolutions_of_halves_use_tensor_cores_without_spills() -> None:
    """The rules choose a large tile for one of the images, and the smallest tile for the other one."""
    halves = [np.zeros(shape, np.float16) for shape in ((8, 64, 64, 64), (64, 64, 3, 3), (64,))]
    small = [np.zeros(shape, np.float16) for shape in ((1, 64, 8, 8), (64, 64, 3, 3), (64,))]
    specs = [
        next(spec for spec in kernels(make_model("Conv", given, {})) if "d_mma_" in spec.name)
        for given in (halves, small)
    ]
    assert [re.findall(r"_(\d+x\d+)x", spec.name)[-1] for spec in specs] == ["96x64", "16x16"]
    for capability in ((8, 0), (9, 0), (10, 0), (12, 0)):
        for spec, code in zip(specs, sass.code_of(specs, Target.cuda(*capability)), strict=True):
            assert code.spilled == 0, (spec.name, capability)
            assert code.uses_tensor_cores or sass.disassembler() is None, (spec.name, capability)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_patches_are_copied_in_pieces_without_bank_conflicts_above_two_way(dtype: type) -> None:
    given: list[Array] = [np.zeros(shape, dtype) for shape in ((8, 64, 32, 32), (64, 64, 3, 3), (64,))]
    work = work_of_model(make_model("Conv", given, {"pads": [1] * 4}), {}, libraries=frozenset())
    step = next(each for each in work.steps if isinstance(each, KernelStep) and "d_mma_" in each.kernel.name)
    kernels_run = [each for each in work.steps if isinstance(each, KernelStep)]
    counted = count_all(work, {each.kernel: sass.Code(32, 0, 0, {}, 1.0) for each in kernels_run})
    sites = counted[work.steps.index(step)].sites
    assert any(site.kind == "load" and site.nbytes == 16 for site in sites)
    shared = [site for site in sites if site.kind.startswith("shared")]
    assert {(site.kind, site.nbytes) for site in shared} >= {("shared load", 16), ("shared store", 16)}
    assert all(site.units <= 2.01 * site.least for site in shared), shared
