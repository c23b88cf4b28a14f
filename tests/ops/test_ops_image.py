"""Operators that resample images, compared with ONNX's reference implementation."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from kernel_harness import make_model, run_model, run_op
from ort_cuda_plugin.abi.core import PluginError

few = settings(max_examples=8)
TRANSFORMATIONS = ["half_pixel", "asymmetric", "align_corners", "half_pixel_symmetric", "pytorch_half_pixel"]


def image(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)


@given(
    mode=st.sampled_from(["linear", "cubic"]),
    transformation=st.sampled_from(TRANSFORMATIONS),
    sizes=st.tuples(st.integers(2, 9), st.integers(2, 9)),
    antialias=st.booleans(),
    exclude_outside=st.booleans(),
    dynamic=st.booleans(),
)
@few
def test_resize_to_sizes(
    mode: str, transformation: str, sizes: tuple[int, ...], antialias: bool, exclude_outside: bool, dynamic: bool
) -> None:
    x = image(1, 2, 5, 4)
    attributes = {
        "mode": mode,
        "coordinate_transformation_mode": transformation,
        "antialias": int(antialias),
        "exclude_outside": int(exclude_outside and mode == "cubic"),
        "axes": [2, 3],
    }
    inputs = [x, None, None, np.array(sizes, np.int64)]
    (actual,) = run_op("Resize", inputs, attributes, constant=[3], dynamic=dynamic)
    model = make_model("Resize", inputs, attributes, constant=[3])
    (expected,) = ReferenceEvaluator(model).run(None, {"x0": x})
    np.testing.assert_allclose(actual, np.asarray(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int32])
@pytest.mark.parametrize(
    ("shape", "axes", "scales"),
    [
        ((2, 3, 16, 12), (2, 3), (0.5, 0.25)),
        ((2, 3, 13, 17), (2, 3), (0.375, 0.75)),
        ((1, 2, 13, 17), (2, 3), (1.7, 0.6)),
        ((1, 16, 12, 3), (1, 2), (0.5, 0.25)),
        ((13, 17), (0, 1), (0.375, 2.5)),
    ],
)
@pytest.mark.parametrize("exclude_outside", [0, 1])
def test_antialias_rounds_integers_after_each_axis(
    mode: str,
    dtype: type[np.integer],
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    scales: tuple[float, ...],
    exclude_outside: int,
) -> None:
    """Antialiased Resize of 8-bit images uses fixed point like the CPU provider and Pillow, and rounds like them."""
    high = 256 if dtype is np.uint8 else 100
    x = np.random.default_rng(0).integers(high // 4, high * 3 // 4, shape).astype(dtype)  # no overshoot below 0
    if dtype is np.uint8:
        x[..., ::3] = 255
    attributes = {"mode": mode, "antialias": 1, "axes": list(axes), "exclude_outside": exclude_outside}
    inputs = [x, None, np.array(scales, np.float32)]
    (actual,) = run_op("Resize", inputs, attributes, constant=[2], dynamic=True)
    model = make_model("Resize", inputs, attributes, constant=[2])
    model.ir_version = 8
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x0": x})
    if 1.7 in scales:  # inexact weights: a result near a half may round either way
        assert np.mean(actual != expected) < 0.02
        expected += np.sign(actual.astype(np.int64) - expected).astype(dtype)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int64])
def test_antialias_rounds_negative_integers_and_other_types_alike(dtype: type[np.integer]) -> None:
    """The reference is NumPy: the CPU provider clamps negative int8 results to 0 and lacks the other types."""
    x = np.array([[-128, -127, -126, -100, 5, 6, 127, 127]], dtype)
    attributes = {"mode": "linear", "antialias": 1, "axes": [1], "exclude_outside": 1}
    (actual,) = run_op("Resize", [x, None, np.array([0.5], np.float32)], attributes, constant=[2])
    weights = [[3, 3, 1, 0, 0, 0, 0, 0], [0, 1, 3, 3, 1, 0, 0, 0], [0, 0, 0, 1, 3, 3, 1, 0], [0, 0, 0, 0, 0, 1, 3, 3]]
    exact = np.array(weights) @ x[0].astype(np.float64) / np.sum(weights, 1)
    np.testing.assert_array_equal(actual[0], np.rint(exact))


def test_an_empty_dimension_stays_empty() -> None:
    x = np.zeros((0, 2, 5, 4), np.float32)
    (actual,) = run_op("Resize", [x, None, None, np.array([0, 2, 7, 3])])
    assert actual.shape == (0, 2, 7, 3)
    with pytest.raises(PluginError, match=r"Resize.* X must have elements"):
        run_op("Resize", [x, None, None, np.array([1, 2, 7, 3])])


@pytest.mark.parametrize("scale", [0.5, 0.7, 1.5, 2.0])
@pytest.mark.parametrize("constant", [[], [2]], ids=["computed", "constant"])
def test_sizes_from_scales_are_those_of_float32_products(scale: float, constant: list[int]) -> None:
    x = image(1, 1, 10, 3)
    scales = np.array([1, 1, scale, 1], np.float32)
    (actual,) = run_op("Resize", [x, None, scales], {"mode": "linear"}, constant=constant, dynamic=bool(constant))
    assert actual.shape == (1, 1, int(np.float32(10) * np.float32(scale)), 3)


def test_a_scale_that_leaves_the_size_as_it_is_resamples() -> None:
    x = np.arange(4, dtype=np.float32)
    attributes = {"mode": "linear", "coordinate_transformation_mode": "asymmetric"}
    (actual,) = run_op("Resize", [x, None, np.array([1.2], np.float32)], attributes, constant=[2])
    np.testing.assert_allclose(actual, np.arange(4) / 1.2, rtol=1e-6)


def test_crop_and_resize_reads_its_region_and_extrapolates() -> None:
    x = np.arange(4, dtype=np.float32)
    inputs = [x, np.array([0, 2], np.float32), None, np.array([4], np.int64)]
    attributes = {
        "mode": "linear",
        "coordinate_transformation_mode": "tf_crop_and_resize",
        "extrapolation_value": 7.0,
    }
    (actual,) = run_op("Resize", inputs, attributes, constant=[1, 3], dynamic=True)
    np.testing.assert_allclose(actual, [0, 2, 7, 7], rtol=1e-6)


def test_upsample_of_any_type() -> None:
    x = np.arange(6, dtype=np.int16).reshape(2, 3)
    (actual,) = run_op("Upsample", [x, np.array([2, 3], np.float32)], opset=9, constant=[1], dynamic=True)
    np.testing.assert_array_equal(actual, x.repeat(2, 0).repeat(3, 1))
    model = make_model("Upsample", [x.astype(np.float32)], {"scales": [2.0, 1.0]}, opset=7)
    (actual,) = run_model(model, [x.astype(np.float32)])
    np.testing.assert_array_equal(actual, x.repeat(2, 0))


@pytest.mark.parametrize("align_corners", [0, 1])
@pytest.mark.parametrize("mode", ["linear", "cubic", "nearest"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_grid_sample_of_places_outside(mode: str, padding: str, align_corners: int) -> None:
    """Compare with the CPU provider, which agrees with PyTorch; ONNX's reference treats cubic borders differently."""
    x, grid = image(2, 3, 5, 4), 1.5 * image(2, 6, 3, 2)
    attributes = {"mode": mode, "padding_mode": padding, "align_corners": align_corners}
    (actual,) = run_op("GridSample", [x, grid], attributes, opset=20, dynamic=True)
    model = make_model("GridSample", [x, grid], attributes, opset=20)
    model.ir_version = 8
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x0": x, "x1": grid})
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("align_corners", [0, 1])
@pytest.mark.parametrize(
    "size", [(2, 3, 4, 5), (2, 1, 1, 3), (1, 2, 3, 1), (1, 2, 3, 4, 2), (1, 1, 1, 3, 2), (1, 1, 2, 1, 1)]
)
def test_affine_grids(size: tuple[int, ...], align_corners: int) -> None:
    rank = len(size) - 2
    inputs = [image(size[0], rank, rank + 1), np.array(size, np.int64)]
    (actual,) = run_op("AffineGrid", inputs, {"align_corners": align_corners}, constant=[1], dynamic=True)
    model = make_model("AffineGrid", inputs, {"align_corners": align_corners}, 21)
    with np.errstate(divide="ignore"):
        (expected,) = ReferenceEvaluator(model).run(None, {"x0": inputs[0], "x1": inputs[1]})
    assert actual.shape == np.shape(expected)
    np.testing.assert_allclose(actual, np.asarray(expected), 1e-5, 1e-6)


def test_global_norm_pooling() -> None:
    x = image(2, 3, 4, 5)
    (actual,) = run_op("GlobalLpPool", [x], {"p": 3}, dynamic=True)
    np.testing.assert_allclose(actual, (np.abs(x) ** 3).sum((2, 3), keepdims=True) ** (1 / 3), rtol=1e-5)
