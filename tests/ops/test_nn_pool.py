"""Pooling and LRN on the emulated device, compared with NumPy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import parser

from kernel_harness import Array, run_model, run_op
from nn_reference import check_close, check_op, lrn, noise, pool, tolerance_of
from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.ep.device.open_device import OpenDevice
from ort_cuda_plugin.model.ir import NodeError
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.program.lowering.context import DeviceProperties

few = settings(max_examples=20)


@st.composite
def poolings(draw: st.DrawFn, rank: int) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Draw a shape and attributes that fit it. Pads are smaller than the kernel: each window has an element."""
    axes = range(rank)
    kernel = [draw(st.integers(1, 3)) for _ in axes]
    attributes: dict[str, Any] = {
        "kernel_shape": kernel,
        "strides": [draw(st.integers(1, 3)) for _ in axes],
        "pads": [draw(st.integers(0, k - 1)) for k in kernel * 2],
        "ceil_mode": draw(st.integers(0, 1)),
    }
    size = [draw(st.integers(3, 12)) for _ in axes]
    return (draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3])), *size), attributes


def check_max_pool(shape: tuple[int, ...], attributes: dict[str, Any], dynamic: bool) -> None:
    x = noise(1, shape)
    (result,) = run_op("MaxPool", [x], attributes, dynamic=dynamic)
    check_close(result, pool(x, attributes, lambda values, _: values.max(axis=-1)), 0)


def check_average_pool(shape: tuple[int, ...], attributes: dict[str, Any], include_pad: int, dynamic: bool) -> None:
    def mean(values: Array, covered: int) -> Array:
        total: Array = values.sum(axis=-1)
        return total / (covered if include_pad else values.shape[-1])

    x = noise(1, shape)
    (result,) = run_op("AveragePool", [x], {**attributes, "count_include_pad": include_pad}, dynamic=dynamic)
    check_close(result, pool(x, attributes, mean), tolerance_of(x))


@few
@given(case=poolings(2), include_pad=st.integers(0, 1), dynamic=st.booleans())
def test_pools_in_2d_are_numpys(case: Any, include_pad: int, dynamic: bool) -> None:
    shape, attributes = case
    check_max_pool(shape, attributes, dynamic)
    check_average_pool(shape, attributes, include_pad, dynamic)


@settings(max_examples=6)
@given(case=st.one_of(poolings(1), poolings(3)))
def test_pools_in_1d_and_3d_are_numpys(case: Any) -> None:
    shape, attributes = case
    check_max_pool(shape, attributes, False)
    check_average_pool(shape, attributes, 0, False)


@pytest.mark.parametrize("op_type", ["MaxPool", "AveragePool"])
def test_windows_with_gaps(op_type: str) -> None:
    check_op(op_type, [noise(1, (1, 2, 9, 8))], {"kernel_shape": [3, 2], "dilations": [2, 3], "strides": [1, 2]})


@pytest.mark.parametrize(
    ("auto_pad", "pads"), [("SAME_UPPER", [1, 0, 1, 1]), ("SAME_LOWER", [1, 1, 1, 0]), ("VALID", [0, 0, 0, 0])]
)
def test_pads_by_name_are_those_in_numbers(auto_pad: str, pads: list[int]) -> None:
    attributes: dict[str, Any] = {"kernel_shape": [3, 3], "strides": [2, 2]}
    x = noise(1, (1, 2, 9, 8))
    (named,) = run_op("MaxPool", [x], {**attributes, "auto_pad": auto_pad})
    (numbered,) = run_op("MaxPool", [x], {**attributes, "pads": pads})
    np.testing.assert_array_equal(named, numbered)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("strides", "pads"),
    [([1, 1], [0, 0, 0, 0]), ([1, 2], [0, 0, 0, 0]), ([2, 2], [0, 0, 0, 0]), ([1, 1], [1, 1, 1, 1])],
)
def test_a_maximum_of_nan_is_nan(dtype: str, strides: list[int], pads: list[int]) -> None:
    """A window with a NaN gives NaN, as in NumPy and PyTorch. In the CPU provider it depends on the NaN's position."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 9, 24)).astype(dtype)
    x[rng.uniform(size=x.shape) < 0.1] = np.nan
    attributes = {"kernel_shape": [2, 2], "strides": strides, "pads": pads, "ceil_mode": 0}
    (result,) = run_op("MaxPool", [x], attributes)
    expected = pool(x, attributes, lambda values, _: values.max(axis=-1))
    np.testing.assert_array_equal(result, expected)
    values, places = run_op("MaxPool", [x], attributes, outputs=2)
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(x.reshape(-1)[places], expected)
    (largest,) = run_op("GlobalMaxPool", [x])
    np.testing.assert_array_equal(largest, x.max((2, 3), keepdims=True))


@pytest.mark.parametrize("storage_order", [0, 1])
def test_max_pool_gives_the_places_of_maxima(storage_order: int) -> None:
    x = noise(1, (2, 3, 7, 6))
    values, places = run_op(
        "MaxPool", [x], {"kernel_shape": [3, 2], "strides": [2, 2], "storage_order": storage_order}, outputs=2
    )
    flat = x.reshape(-1) if storage_order == 0 else x.transpose(0, 1, 3, 2).reshape(-1)
    np.testing.assert_array_equal(flat[places], values)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_pools_of_each_float_type(dtype: str) -> None:
    for op_type in ("MaxPool", "AveragePool"):
        check_op(op_type, [noise(1, (1, 2, 8, 8), dtype)], {"kernel_shape": [3, 3]})


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_max_pool_of_bytes(dtype: type[np.integer]) -> None:
    x: Array = np.random.default_rng(1).integers(np.iinfo(dtype).min, np.iinfo(dtype).max, (1, 2, 6, 6)).astype(dtype)
    (result,) = run_op("MaxPool", [x], {"kernel_shape": [2, 2], "strides": [2, 2]})
    np.testing.assert_array_equal(result, x.reshape(1, 2, 3, 2, 3, 2).max(axis=(3, 5)))


@pytest.mark.parametrize(("op_type", "function"), [("GlobalAveragePool", np.mean), ("GlobalMaxPool", np.max)])
@pytest.mark.parametrize("shape", [(2, 3, 5), (1, 4, 7, 6), (2, 2, 3, 4, 5), (0, 3, 5, 5)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_global_pools_are_numpys(op_type: str, function: Any, shape: tuple[int, ...], dynamic: bool) -> None:
    x = noise(1, shape)
    (result,) = run_op(op_type, [x], dynamic=dynamic)
    axes = tuple(range(2, len(shape)))
    check_close(result, function(x.astype(np.float64), axis=axes, keepdims=True), tolerance_of(x))


@few
@given(channels=st.integers(1, 9), size=st.integers(1, 6), bias=st.sampled_from([1.0, 2.0]))
def test_lrn_is_numpys(channels: int, size: int, bias: float) -> None:
    x = noise(1, (2, channels, 4, 3))
    attributes: dict[str, Any] = {"size": size, "alpha": 0.1, "beta": 0.6, "bias": bias}
    (result,) = run_op("LRN", [x], attributes)
    check_close(result, lrn(x, **attributes), 1e-6)


@few
@given(channels=st.integers(1, 40), size=st.sampled_from([17, 18, 30]))
def test_lrn_over_many_channels_is_numpys(channels: int, size: int) -> None:
    x = noise(1, (1, channels, 2, 3))
    attributes: dict[str, Any] = {"size": size, "alpha": 0.1, "beta": 0.75, "bias": 1.0}
    (result,) = run_op("LRN", [x], attributes)
    check_close(result, lrn(x, **attributes), 1e-6)


ALONG_CHANNELS = """<ir_version: 10, opset_import: ["" : 20]> norms
    (float[R, 24] x, float16[R, 32] h, float[2, 6, 9, 32] i, float[R, 27] o)
    => (float[R, 24] few, float[R, 24] many, float16[R, 32] half, float[2, 6, 9, 32] image, float[R, 27] odd) {
    few = LRN<size = 5, alpha = 0.1>(x) many = LRN<size = 12, alpha = 0.1, beta = 0.5>(x)
    half = LRN<size = 4, alpha = 0.1>(h) image = LRN<size = 3, alpha = 0.1>(i) odd = LRN<size = 5, alpha = 0.1>(o) }"""


def test_a_gpu_reads_neighboring_channels_by_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenDevice, "properties", lambda self: DeviceProperties(emulated=False))
    model = parser.parse_model(ALONG_CHANNELS.replace("[R", "[70"))
    made = CompiledCluster(read_model(model), DeviceProperties(emulated=False)).prepare()
    vectors = [kernel.source.count("load_around(") for kernel in made.kernels]
    assert sorted(vectors) == [0, 0, 1, 1, 1]
    x, h, i, o = noise(1, (70, 24)), noise(2, (70, 32)).astype(np.float16), noise(3, (2, 6, 9, 32)), noise(4, (70, 27))
    few, many, half, image, odd = run_model(model, [x, h, i, o])

    def wanted(x: Array, size: int, beta: float = 0.75) -> Array:
        rows: Array = x[:, :, None, None] if x.ndim == 2 else x
        return lrn(rows, size, 0.1, beta, 1.0).reshape(x.shape)

    check_close(few, wanted(x, 5), 1e-6)
    check_close(many, wanted(x, 12, 0.5), 1e-6)
    check_close(half, wanted(h, 4), 1e-3)
    check_close(image, wanted(i, 3), 1e-6)
    check_close(odd, wanted(o, 5), 1e-6)


def test_a_window_without_size_is_named() -> None:
    with pytest.raises(NodeError, match="kernel_shape must have 2 entries, got 1"):
        run_op("MaxPool", [noise(1, (1, 1, 4, 4))], {"kernel_shape": [2]})


def test_windows_side_by_side_are_read_by_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that do not overlap along the last axis are loaded as vectors, also with padding along other axes."""
    monkeypatch.setattr(OpenDevice, "properties", lambda self: DeviceProperties(emulated=False))
    model = parser.parse_model("""<ir_version: 10, opset_import: ["" : 20]> pools
        (float16[2, 3, 7, 32] h, float[2, 3, 5, 24] x, uint8[1, 2, 128] u)
        => (float16[2, 3, 3, 16] most, float[2, 3, 5, 12] mean, uint8[1, 2, 32] least)
        { most = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(h)
          mean = AveragePool<kernel_shape = [3, 2], strides = [1, 2], pads = [1, 0, 1, 0]>(x)
          least = MaxPool<kernel_shape = [4], strides = [4]>(u) }""")
    rng = np.random.default_rng(0)
    h, x = rng.standard_normal((2, 3, 7, 32)).astype(np.float16), rng.standard_normal((2, 3, 5, 24), np.float32)
    u = rng.integers(0, 255, (1, 2, 128), np.uint8)
    h[rng.uniform(size=h.shape) < 0.02] = np.nan
    most, mean, least = run_model(model, [h, x, u])
    np.testing.assert_array_equal(most, h[:, :, :6].reshape(2, 3, 3, 2, 16, 2).max((3, 5)))
    lines = np.pad(x.reshape(2, 3, 5, 12, 2).sum(-1, dtype=np.float64), ((0, 0), (0, 0), (1, 1), (0, 0)))
    counts = np.array([4, 6, 6, 6, 4])[:, None]
    np.testing.assert_allclose(mean, sum(lines[:, :, i : i + 5] for i in range(3)) / counts, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(least, u.reshape(1, 2, 32, 4).max(-1))
    kernels = CompiledCluster(read_model(model), DeviceProperties(emulated=False)).prepare().kernels
    assert [spec.name for spec in kernels if not spec.name.endswith("_vectors")] == []
