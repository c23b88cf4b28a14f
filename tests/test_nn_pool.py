"""Pooling and LRN on the emulated device against onnx.reference in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_harness import run_op
from nn_reference import check_op, noise

from ort_cuda_plugin.graph.node_lowering import NodeError

few = settings(max_examples=20, deadline=None)


@st.composite
def poolings(draw: st.DrawFn, rank: int, ceil: bool = True) -> tuple[tuple[int, ...], dict[str, Any]]:
    """A shape and attributes that fit it. Pads are smaller than the kernel, so that no window lies in padding alone."""
    axes = range(rank)
    kernel = [draw(st.integers(1, 3)) for _ in axes]
    attributes: dict[str, Any] = {
        "kernel_shape": kernel,
        "strides": [draw(st.integers(1, 3)) for _ in axes],
        "pads": [draw(st.integers(0, k - 1)) for k in kernel * 2],
        "ceil_mode": draw(st.integers(0, int(ceil))),
    }
    size = [draw(st.integers(3, 12)) for _ in axes]
    return (draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3])), *size), attributes


@few
@given(case=poolings(2), dynamic=st.booleans())
def test_max_pool_2d_is_the_references(case: Any, dynamic: bool) -> None:
    shape, attributes = case
    check_op("MaxPool", [noise(1, shape)], attributes, dynamic=dynamic)


@few
@given(case=poolings(2), include_pad=st.integers(0, 1), dynamic=st.booleans())
def test_average_pool_2d_is_the_references(case: Any, include_pad: int, dynamic: bool) -> None:
    shape, attributes = case
    check_op("AveragePool", [noise(1, shape)], {**attributes, "count_include_pad": include_pad}, dynamic=dynamic)


@settings(max_examples=6, deadline=None)
@given(case=st.one_of(poolings(1, ceil=False), poolings(3, ceil=False)))
def test_pools_in_1d_and_3d_are_the_references(case: Any) -> None:
    shape, attributes = case
    check_op("MaxPool", [noise(1, shape)], attributes)
    check_op("AveragePool", [noise(1, shape)], attributes)


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
def test_max_pool_of_bytes(dtype: type) -> None:
    x = np.random.default_rng(1).integers(np.iinfo(dtype).min, np.iinfo(dtype).max, (1, 2, 6, 6)).astype(dtype)
    (result,) = run_op("MaxPool", [x], {"kernel_shape": [2, 2], "strides": [2, 2]})
    np.testing.assert_array_equal(result, x.reshape(1, 2, 3, 2, 3, 2).max(axis=(3, 5)))


@pytest.mark.parametrize("op_type", ["GlobalAveragePool", "GlobalMaxPool"])
@pytest.mark.parametrize("shape", [(2, 3, 5), (1, 4, 7, 6), (2, 2, 3, 4, 5), (0, 3, 5, 5)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_global_pools_are_the_references(op_type: str, shape: tuple[int, ...], dynamic: bool) -> None:
    check_op(op_type, [noise(1, shape)], dynamic=dynamic)


@few
@given(channels=st.integers(1, 9), size=st.sampled_from([1, 3, 5]), bias=st.sampled_from([1.0, 2.0]))
def test_lrn_is_the_references(channels: int, size: int, bias: float) -> None:
    attributes = {"size": size, "alpha": 0.1, "beta": 0.6, "bias": bias}
    check_op("LRN", [noise(1, (2, channels, 4, 3))], attributes, tolerance=1e-6)


def test_a_window_without_size_is_named() -> None:
    with pytest.raises(NodeError, match="the kernel has 1 dimensions"):
        run_op("MaxPool", [noise(1, (1, 1, 4, 4))], {"kernel_shape": [2]})
