"""RoiAlign, MaxRoiPool, Col2Im, MaxUnpool, DeformConv and Det, compared with references."""

from __future__ import annotations

import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from kernel_harness import make_model, run_op
from ort_cuda_plugin.abi.core import PluginError
from ort_cuda_plugin.model.ir import InvalidModel, NodeError

Array = np.ndarray[Any, np.dtype[Any]]

REFUSED = (NodeError, InvalidModel, PluginError)
PARAMETER = st.integers(2, 3)
"""Strides, dilations, pads. Values from 2 on share one kernel, which saves compile time; 0 and 1 have their own."""


def floats(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def on_cpu(model: onnx.ModelProto, inputs: list[Array]) -> list[Array]:
    model.ir_version = 10
    session = ort.InferenceSession(
        onnx.shape_inference.infer_shapes(model).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    results: list[Array] = session.run(None, dict(zip([v.name for v in session.get_inputs()], inputs, strict=True)))
    return results


# ---- Det ----


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(0, 0), (1, 1), (2, 2), (3, 5, 5), (2, 3, 4, 4), (0, 3, 3), (17, 17)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_det(shape: tuple[int, ...], dtype: type[np.generic], dynamic: bool) -> None:
    x = floats(*shape).astype(dtype)
    (y,) = run_op("Det", [x], opset=22, dynamic=dynamic)
    expected = np.asarray(np.linalg.det(x.astype(np.float64)))
    tolerance = {2: 2.0**-7 if dtype == ml_dtypes.bfloat16 else 2.0**-10, 4: 1e-4, 8: 1e-12}[np.dtype(dtype).itemsize]
    assert y.shape == expected.shape
    with np.errstate(over="ignore"):
        rounded = expected.astype(dtype).astype(np.float64)
    np.testing.assert_allclose(y.view(dtype).astype(np.float64), rounded, rtol=tolerance)


def test_det_exchanges_rows_and_sees_that_a_matrix_is_singular() -> None:
    for order in itertools.permutations(range(4)):
        x = np.eye(4, dtype=np.float32)[list(order)]
        assert run_op("Det", [x])[0] == round(np.linalg.det(x))
    assert run_op("Det", [np.array([[1, 2, 3], [2, 4, 6], [1, 0, 1]], np.float32)])[0] == 0
    assert run_op("Det", [np.zeros((3, 3), np.float32)])[0] == 0


@pytest.mark.parametrize("dynamic", [False, True])
def test_det_of_other_matrices_is_refused(dynamic: bool) -> None:
    with pytest.raises(REFUSED, match="square"):
        run_op("Det", [floats(2, 3)], dynamic=dynamic)


# ---- Col2Im ----


@pytest.mark.parametrize(
    ("rank", "dtype", "plain"),
    [
        (1, np.int8, False),
        (1, np.bool_, True),
        (2, np.float32, False),
        (2, np.float16, True),
        (3, np.int64, False),
    ],
)
@settings(max_examples=6)
@given(st.data())
def test_col2im(rank: int, dtype: type[np.generic], plain: bool, data: st.DataObject) -> None:
    block = tuple(data.draw(PARAMETER) for _ in range(rank))
    steps, gaps = (tuple(1 if plain else data.draw(PARAMETER) for _ in range(rank)) for _ in range(2))
    pads = tuple(0 if plain else data.draw(PARAMETER) for _ in range(2 * rank))
    image = tuple(
        max((k - 1) * gap + 1 - before - after, 1) + data.draw(st.integers(0, 4))
        for k, gap, before, after in zip(block, gaps, pads[:rank], pads[rank:], strict=True)
    )
    count = [
        (size + pads[d] + pads[rank + d] - (block[d] - 1) * gaps[d] - 1) // steps[d] + 1
        for d, size in enumerate(image)
    ]  # fmt: skip
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2 if dtype == np.bool_ else 5, (2, 3 * math.prod(block), math.prod(count))).astype(dtype)
    padded = np.zeros((2, 3, *(n + pads[d] + pads[rank + d] for d, n in enumerate(image))), dtype)
    columns = x.reshape(2, 3, *block, *count)
    for tap in np.ndindex(*block):
        places: tuple[Any, ...] = tuple(
            slice(t * gap, t * gap + n * step, step) for t, gap, n, step in zip(tap, gaps, count, steps, strict=True)
        )
        padded[(..., *places)] += columns[(slice(None), slice(None), *tap)]
    inner: list[Any] = [slice(pads[d], pads[d] + n) for d, n in enumerate(image)]
    expected = padded[(..., *inner)]
    attributes = {"strides": steps, "dilations": gaps, "pads": pads}
    inputs = [x, np.array(image), np.array(block)]
    for constant, dynamic in (((1, 2), False), ((1, 2), True), ((), False)):
        (y,) = run_op("Col2Im", inputs, attributes, constant=constant, dynamic=dynamic)
        np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("shape", [(1, 5, 4), (1, 4, 5)])
def test_col2im_of_blocks_that_do_not_fit_is_refused(shape: tuple[int, ...], dynamic: bool) -> None:
    with pytest.raises(REFUSED, match=r"a multiple of|the size 4"):
        run_op("Col2Im", [floats(*shape), np.array([3, 3]), np.array([2, 2])], constant=(1, 2), dynamic=dynamic)


# ---- MaxUnpool ----


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("size", [(8,), (6, 4), (4, 6, 2)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_max_unpool_puts_back_what_max_pool_took(size: tuple[int, ...], dtype: type[np.generic], dynamic: bool) -> None:
    rng = np.random.default_rng(0)
    x = rng.permutation(6 * math.prod(size)).reshape(2, 3, *size).astype(np.float32)
    attributes = {"kernel_shape": [2] * len(size), "strides": [2] * len(size)}
    largest, indices = run_op("MaxPool", [x], attributes, outputs=2)
    (y,) = run_op("MaxUnpool", [largest.astype(dtype), indices], attributes, 22, dynamic=dynamic)
    expected = np.zeros(x.size, dtype)
    expected[indices.reshape(-1)] = largest.reshape(-1).astype(dtype)
    np.testing.assert_array_equal(y.view(dtype), expected.reshape(x.shape))


@pytest.mark.parametrize("constant", [(2,), ()])
@pytest.mark.parametrize("shape", [(1, 1, 5, 6), (1, 1, 4, 4), (1, 2, 3, 4)])
def test_max_unpool_to_another_shape(shape: tuple[int, ...], constant: tuple[int, ...]) -> None:
    x, indices = floats(1, 1, 2, 2), np.array([[[[0, 7], [8, 15]]]])
    attributes = {"kernel_shape": [2, 2], "strides": [2, 2]}
    inner = np.zeros(16, np.float32)
    inner[indices.reshape(-1)] = x.reshape(-1)
    expected = np.zeros(shape, np.float32)
    rows, columns = min(shape[2], 4), min(shape[3], 4)
    expected[0, 0, :rows, :columns] = inner.reshape(4, 4)[:rows, :columns]
    (y,) = run_op("MaxUnpool", [x, indices, np.array(shape)], attributes, constant=constant)
    np.testing.assert_array_equal(y, expected)


def test_max_unpool_ignores_indices_outside() -> None:
    indices = np.array([[[-1, 4, 2**62, -(2**63)]]])
    (y,) = run_op("MaxUnpool", [np.ones((1, 1, 4), np.float32), indices], {"kernel_shape": [1]})
    assert y.tolist() == [[[0, 0, 0, 0]]]
    with pytest.raises(REFUSED, match="I must have the shape"):
        run_op("MaxUnpool", [np.ones((1, 1, 4), np.float32), indices[..., :3]], {"kernel_shape": [1]}, dynamic=True)


# ---- RoiAlign and MaxRoiPool ----


@pytest.mark.parametrize(
    ("mode", "sampling_ratio", "transformation"),
    [("avg", 0, "half_pixel"), ("avg", 3, "output_half_pixel"), ("max", 3, "half_pixel")],
)
@settings(max_examples=8)
@given(st.data())
def test_roi_align(mode: str, sampling_ratio: int, transformation: str, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    height, width = data.draw(st.integers(2, 7)), data.draw(st.integers(2, 7))
    x = rng.standard_normal((2, 2, height, width)).astype(np.float32)
    corners = rng.uniform(-6, 14, (3, 2))
    sizes = rng.uniform(-2 if data.draw(st.booleans()) else 0, 9, (3, 2))
    rois = np.concatenate([corners, corners + sizes], 1).astype(np.float32)
    attributes = {
        "mode": mode,
        "output_height": data.draw(st.integers(2, 3)),
        "output_width": data.draw(st.integers(2, 3)),
        "sampling_ratio": sampling_ratio,
        "spatial_scale": 0.5,
        "coordinate_transformation_mode": transformation,
    }
    inputs: list[Array] = [x, rois, rng.integers(0, 2, 3)]
    (expected,) = ReferenceEvaluator(make_model("RoiAlign", inputs, attributes, 16)).run(
        None, {f"x{i}": value for i, value in enumerate(inputs)}
    )
    for dynamic in (False, True):
        (y,) = run_op("RoiAlign", inputs, attributes, 22 if dynamic else 16, dynamic=dynamic)
        np.testing.assert_allclose(y, np.asarray(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
def test_roi_align_of_other_types(dtype: type[np.generic]) -> None:
    x, rois = floats(1, 2, 5, 6), np.array([[0, 1, 4, 3.5], [1, 1, 2, 5]], np.float32)
    attributes = {"output_height": 2, "output_width": 2}
    (expected,) = run_op("RoiAlign", [x.astype(dtype).astype(np.float32), rois, np.zeros(2, np.int64)], attributes, 22)
    (y,) = run_op("RoiAlign", [x.astype(dtype), rois.astype(dtype), np.zeros(2, np.int64)], attributes, 22)
    tolerance = 2.0**-7 if np.dtype(dtype).itemsize == 2 else 1e-5
    np.testing.assert_allclose(y.view(dtype).astype(np.float32), expected, rtol=tolerance, atol=tolerance / 8)


def test_roi_align_of_version_10_has_no_half_pixel() -> None:
    inputs = [floats(1, 1, 6, 6), np.array([[1, 1, 3, 4]], np.float32), np.zeros(1, np.int64)]
    attributes = {"output_height": 2, "output_width": 2}
    (y,) = run_op("RoiAlign", inputs, attributes, 10)
    (expected,) = run_op("RoiAlign", inputs, attributes | {"coordinate_transformation_mode": "output_half_pixel"}, 16)
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("mode", ["avg", "max"])
def test_regions_of_any_numbers_end_soon(mode: str) -> None:
    huge, nan, inf = 1e30, np.nan, np.inf
    rois = np.array([[-huge, -huge, huge, huge], [nan] * 4, [-inf, 0, inf, 3], [0, 0, huge, 2]], np.float32)
    inputs = [floats(1, 1, 4, 4), rois, np.zeros(4, np.int64)]
    (y,) = run_op("RoiAlign", inputs, {"mode": mode}, 16)
    assert y.shape == (4, 1, 1, 1)
    outside = [inputs[0], np.array([[0, 0, 2, 2]] * 2, np.float32), np.array([1, -1])]
    assert run_op("RoiAlign", outside, {"mode": mode}, 16)[0].tolist() == [[[[0.0]]]] * 2
    pooled = run_op("MaxRoiPool", [inputs[0], np.insert(rois, 0, 0, axis=1)], {"pooled_shape": [2, 2]}, 22)[0]
    assert pooled.shape == (4, 1, 2, 2)


@pytest.mark.parametrize(("sizes", "scale"), [(st.just(1), 0.25), (st.integers(2, 9), 0.5)])
@settings(max_examples=12)
@given(st.data())
def test_max_roi_pool(sizes: Any, scale: float, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    x = rng.standard_normal((2, 3, data.draw(sizes), data.draw(sizes))).astype(np.float32)
    corners = rng.integers(-2, 14, (4, 2))
    rois = np.concatenate([rng.integers(0, 2, (4, 1)), corners, corners + rng.integers(0, 12, (4, 2))], 1)
    rois = rois.astype(np.float32)
    attributes = {
        "pooled_shape": [min(data.draw(sizes), 4), min(data.draw(sizes), 4)],
        "spatial_scale": scale,
    }
    (expected,) = on_cpu(make_model("MaxRoiPool", [x, rois], attributes, 21), [x, rois])
    for dynamic in (False, True):
        (y,) = run_op("MaxRoiPool", [x, rois], attributes, 22 if dynamic else 1, dynamic=dynamic)
        np.testing.assert_array_equal(y, expected)


# ---- DeformConv ----


@pytest.mark.parametrize(("bias", "masked", "plain"), [(True, True, False), (False, False, False), (True, False, True)])
@settings(max_examples=6)
@given(st.data())
def test_deform_conv(bias: bool, masked: bool, plain: bool, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    group, offset_group = data.draw(st.sampled_from([1, 2])), data.draw(st.sampled_from([1, 2]))
    kernel = [data.draw(PARAMETER) for _ in range(2)]
    steps, gaps = ([1 if plain else data.draw(PARAMETER) for _ in range(2)] for _ in range(2))
    pads = [0 if plain else data.draw(PARAMETER) for _ in range(4)]
    size = [5, 6]
    out = [(size[d] + pads[d] + pads[d + 2] - (kernel[d] - 1) * gaps[d] - 1) // steps[d] + 1 for d in range(2)]
    taps = math.prod(kernel)

    def draw(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32)

    inputs: list[Array | None] = [
        draw(2, 4, *size),
        draw(6, 4 // group, *kernel),
        draw(2, offset_group * taps * 2, *out) * 2,
    ]
    inputs += [draw(6) if bias else None]
    inputs += [draw(2, offset_group * taps, *out) if masked else None]
    attributes = {"group": group, "offset_group": offset_group, "strides": steps, "dilations": gaps, "pads": pads}
    present = [x for x in inputs if x is not None]
    (expected,) = on_cpu(make_model("DeformConv", inputs, attributes, 19), present)
    for dynamic in (False, True):
        (y,) = run_op("DeformConv", inputs, attributes, 22 if dynamic else 19, dynamic=dynamic)
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("size", "kernel"), [((7,), (3,)), ((4, 5, 6), (2, 3, 2))])
def test_deform_conv_without_offsets_is_a_convolution(size: tuple[int, ...], kernel: tuple[int, ...]) -> None:
    x, w = floats(2, 4, *size), floats(6, 2, *kernel)
    (expected,) = run_op("Conv", [x, w], {"group": 2})
    offset = np.zeros((2, math.prod(kernel) * len(size), *expected.shape[2:]), np.float32)
    (y,) = run_op("DeformConv", [x, w, offset], {"group": 2}, 19)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("number", [1e30, np.inf, -np.inf, np.nan])
def test_deform_conv_far_from_the_image_is_0_or_nan(number: float) -> None:
    x, w, offset = np.ones((1, 1, 3, 3), np.float32), np.ones((1, 1, 1, 1), np.float32), np.zeros((1, 2, 3, 3))
    offset[0, 0, 0, 0] = number
    (y,) = run_op("DeformConv", [x, w, offset.astype(np.float32)], {}, 19)
    assert y[0, 0, 0, 0] == 0
    assert (y.reshape(-1)[1:] == 1).all()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("which", "what"), [(2, "offset"), (3, "bias"), (4, "mask")])
def test_deform_conv_of_other_shapes_is_refused(which: int, what: str, dynamic: bool) -> None:
    inputs = [floats(1, 2, 4, 4), floats(2, 2, 2, 2), floats(1, 8, 3, 3), floats(2), floats(1, 4, 3, 3)]
    inputs[which] = inputs[which][..., :1]
    with pytest.raises(REFUSED, match=what):
        run_op("DeformConv", inputs, {}, 19, dynamic=dynamic)
