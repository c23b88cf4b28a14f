"""Kernels with 64-bit index arithmetic, which sizes of 2**31 elements and more need, at sizes that fit a test."""

from __future__ import annotations

import numpy as np
import pytest

from kernel_harness import run_op
from nn_reference import check_close, check_op, conv_transpose, lrn, noise, tolerance_of
from ort_cuda_plugin.clusters import cluster
from ort_cuda_plugin.program.lowering.context import DeviceProperties, Lowering, LoweringOptions


@pytest.fixture(autouse=True)
def wide_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "LoweringOptions", lambda: LoweringOptions(wide_indices=True))
    assert Lowering(DeviceProperties(), vars(cluster)["LoweringOptions"]()).index_dtype(1) == "i64"


@pytest.mark.parametrize("m", [1, 70])
def test_products(m: int) -> None:
    check_op("MatMul", [noise(1, (2, m, 21)), noise(2, (2, 21, 33))])
    check_op("Gemm", [noise(1, (m, 21)), noise(2, (33, 21)), noise(3, (33,))], {"transB": 1})


def test_convolutions() -> None:
    check_op("Conv", [noise(1, (2, 8, 13, 12)), noise(2, (16, 8, 3, 3))], {"pads": [1, 2, 0, 1]}, constant=[1])
    check_op("Conv", [noise(1, (2, 8, 13, 12)), noise(2, (8, 1, 3, 3))], {"group": 8}, constant=[1])
    x, w, b = noise(1, (2, 4, 5, 4)), noise(2, (4, 3, 3, 3)), noise(3, (3,))
    attributes = {"group": 1, "strides": [2, 2], "dilations": [1, 1], "pads": [1] * 4, "output_padding": [0, 0]}
    (result,) = run_op("ConvTranspose", [x, w, b], attributes)
    check_close(result, conv_transpose(x, w, b, attributes), tolerance_of(x))


def test_pools_and_lrn() -> None:
    x = noise(1, (2, 3, 8, 9))
    values, places = run_op("MaxPool", [x], {"kernel_shape": [3, 2], "storage_order": 1}, outputs=2)
    np.testing.assert_array_equal(x.transpose(0, 1, 3, 2).reshape(-1)[places], values)
    check_op("AveragePool", [x], {"kernel_shape": [3, 3], "count_include_pad": 1})
    (result,) = run_op("LRN", [x], {"size": 3})
    check_close(result, lrn(x, 3, 1e-4, 0.75, 1.0), 1e-6)
