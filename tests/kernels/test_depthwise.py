"""The depthwise convolution kernels for GPUs, against ONNX Runtime's CPU provider."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import numpy_helper, parser

from contributed import noise
from kernel_harness import make_model, run_model, run_op
from ort_cuda_plugin.compiler.targets import Target
from ort_cuda_plugin.ep.device.open_device import OpenDevice
from ort_cuda_plugin.estimate import sass
from ort_cuda_plugin.program.lowering.context import DeviceProperties
from test_mma_conv import expected
from test_mma_gemm import SMALL_GPU, kernels

GPU = DeviceProperties.gpu((9, 0))
FEW = DeviceProperties(emulated=False, multiprocessors=1)
"""With one multiprocessor even a small image fills the device, so threads compute several output pixels."""
CASES = {
    "rows": ((2, 32, 48, 46), (3, 3), {"pads": [1] * 4}, 32),
    "strides": ((2, 24, 52, 49), (5, 5), {"pads": [2] * 4, "strides": [2, 2]}, 32),
    "dilations": ((1, 64, 12, 61), (3, 2), {"pads": [2, 1, 0, 1], "dilations": [2, 3]}, 32),
    "odd rows": ((2, 12, 47, 50), (5, 3), {"pads": [2, 1, 2, 1]}, 16),
    "odd channels": ((2, 9, 64, 50), (3, 3), {}, 8),
    "line": ((2, 16, 1200), (3,), {"pads": [1, 1]}, 16),
    "volume": ((1, 16, 6, 20, 24), (2, 3, 3), {"pads": [0, 1, 1, 1, 1, 1]}, 32),
    "many taps": ((1, 32, 34, 34), (7, 7), {"pads": [3] * 4}, 4),
    "one place": ((1, 32, 7, 6), (3, 3), {"pads": [1] * 4, "strides": [3, 3]}, 2),
}
"""The shapes of the image and of the window, attributes, and the accumulators per thread."""


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize(
    ("image", "kernel", "attributes", "device"),
    [
        pytest.param((2, 64, 9, 11), (3, 3), {"pads": [1, 1, 1, 1]}, GPU, id="padded"),
        pytest.param((3, 24, 13, 8), (1, 3), {"pads": [0, 1, 0, 0], "strides": [2, 2]}, GPU, id="with steps"),
        pytest.param((1, 13, 7, 7), (5, 2), {"dilations": [1, 2]}, GPU, id="channels without vectors"),
        pytest.param((2, 16, 30), (5,), {"pads": [2, 2]}, GPU, id="lines"),
        pytest.param((1, 8, 4, 5, 6), (2, 3, 2), {"strides": [1, 2, 1]}, GPU, id="volumes"),
        pytest.param((2, 32, 17, 14), (3, 3), {"pads": [1, 1, 1, 1]}, SMALL_GPU, id="several places of a thread"),
    ],
)
def test_the_result_lies_in_the_order_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
    image: tuple[int, ...],
    kernel: tuple[int, ...],
    attributes: dict[str, Any],
    device: DeviceProperties,
    dtype: Any,
) -> None:
    channels = image[1]
    shapes = (image, (channels, 1, *kernel), (channels,))
    x, w, b = (noise(*shape, seed=i, scale=0.5).astype(dtype) for i, shape in enumerate(shapes))
    attributes = attributes | {"group": channels}
    monkeypatch.setattr(OpenDevice, "properties", lambda self: device)
    assert any("store_lanes" in spec.source for spec in kernels(make_model("Conv", [x, w, b], attributes), device))
    (actual,) = run_op("Conv", [x, w, b], attributes)
    if dtype is ml_dtypes.bfloat16:
        actual = actual.view(dtype)
    tolerance = {np.float16: 2e-3, np.float32: 1e-5}.get(dtype, 1.6e-2)
    np.testing.assert_allclose(actual.astype(np.float32), expected(x, w, b, attributes), tolerance, tolerance)


def halves(image: tuple[int, ...], window: tuple[int, ...]) -> tuple[Any, Any, Any]:
    channels = image[1]
    shapes = image, (channels, 1, *window), (channels,)
    x, w, b = (noise(*shape, seed=seed).astype(np.float16) for seed, shape in enumerate(shapes))
    return x, w, b


def check(actual: Any, wanted: Any) -> None:
    np.testing.assert_allclose(actual.astype(np.float32), wanted, 4e-3, 4e-3)


@pytest.mark.parametrize("case", CASES)
def test_each_place_of_a_thread_is_right(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    image, window, attributes, sums = CASES[case]
    monkeypatch.setattr(OpenDevice, "properties", lambda self: FEW)
    x, w, b = halves(image, window)
    given = {"group": image[1], **attributes}
    source = next(spec.source for spec in kernels(make_model("Conv", [x, w, b], given), FEW) if "taps" in spec.source)
    assert re.findall(r"total = registers_f32\((\d+)\)", source) == [str(sums)]
    (actual,) = run_op("Conv", [x, w, b], given)
    check(actual, expected(x, w, b, given))


def test_what_begins_beside_a_vector_is_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel checks the alignment of both at run time: an NCHW image of one pixel is the caller's buffer itself,
    and the bias begins at the second element of a tensor.
    """
    monkeypatch.setattr(OpenDevice, "properties", lambda self: FEW)
    x, w, _ = halves((1, 2048, 1, 1), (3, 3))
    b = noise(2049, seed=4).astype(np.float16)
    text = """<ir_version: 10, opset_import: ["" : 20]> beside
        (float16[1, 2048, 1, 1] x, float16[2049] b) => (float16[1, 2048, 2, 3] y)
        <float16[2048, 1, 3, 3] w = {0}> {
        one = Constant<value_ints = [1]>() most = Constant<value_ints = [2049]>() part = Slice(b, one, most)
        shape = Constant<value_ints = [1, -1, 1, 1]>() bias = Reshape(part, shape)
        p = Conv<group = 2048, pads = [1, 2, 2, 2]>(x, w) q = Add(p, bias) y = Relu(q) }"""
    model = parser.parse_model(text)
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(w, "w"))
    sources = [spec.source for spec in kernels(model, FEW) if "taps" in spec.source]
    assert [source.count("is_aligned(") for source in sources] == [2]
    (actual,) = run_model(model, [x, b])
    given = {"group": 2048, "pads": [1, 2, 2, 2]}
    check(actual, np.maximum(expected(x, w, b[1:], given), 0))


def test_channels_of_several_axes_take_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A channel shuffle in the epilogue splits the channels into two axes."""
    monkeypatch.setattr(OpenDevice, "properties", lambda self: FEW)
    text = """<ir_version: 10, opset_import: ["" : 20]> shuffled (float16[2, 6, 9, 10] x) => (float16[2, 6, 7, 8] y)
        <float16[6, 1, 3, 3] w = {0}, int64[5] apart = {2, 2, 3, 7, 8}, int64[4] joined = {2, 6, 7, 8}> {
        c = Conv<group = 6>(x, w) h = Reshape(c, apart) t = Transpose<perm = [0, 2, 1, 3, 4]>(h)
        y = Reshape(t, joined) }"""
    model = parser.parse_model(text)
    x, w = noise(2, 6, 9, 10, seed=1).astype(np.float16), noise(6, 1, 3, 3, seed=2).astype(np.float16)
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(w, "w"))
    (actual,) = run_model(model, [x])
    wanted = expected(x, w, np.zeros(6, np.float16), {"group": 6})
    check(actual, np.asarray(wanted).reshape(2, 2, 3, 7, 8).swapaxes(1, 2).reshape(2, 6, 7, 8))


def test_images_of_the_plan_are_read_by_vectors_alone() -> None:
    """In the plugin's own, aligned memory all loads are vector accesses; few waits per load (``rounds``)."""
    x, w, b = halves((8, 64, 56, 56), (3, 3))
    model = make_model("Conv", [x, w, b], {"group": 64})
    for value, data in zip(list(model.graph.input)[1:], (w, b), strict=True):
        model.graph.input.remove(value)
        model.graph.initializer.append(numpy_helper.from_array(data, value.name))
    specs = [spec for spec in kernels(model, GPU) if "taps" in spec.source]
    for capability in ((8, 0), (9, 0), (10, 0), (12, 0)):
        (code,) = sass.code_of(specs, Target.cuda(*capability))
        assert code.spilled == 0
        if sass.disassembler() is not None:
            assert {name for name in code.mix if name.startswith(("LDG", "LDL"))} == {"LDG.64"}, code.mix
            assert code.rounds < 0.25


def test_a_thread_of_few_places_waits_for_its_loads_together() -> None:
    """With one image a thread has one output pixel: the loads of its weights and of its window overlap."""
    x, w, b = (y.astype(np.float32) for y in halves((1, 512, 14, 14), (3, 3)))
    model = make_model("Conv", [x, w, b], {"group": 512, "pads": [1, 1, 1, 1]})
    for value, data in zip(list(model.graph.input)[1:], (w, b), strict=True):
        model.graph.input.remove(value)
        model.graph.initializer.append(numpy_helper.from_array(data, value.name))
    (code,) = sass.code_of([spec for spec in kernels(model, GPU) if "taps" in spec.source], Target.cuda(9, 0))
    assert code.spilled == 0
    if sass.disassembler() is not None:
        assert code.rounds < 0.15
