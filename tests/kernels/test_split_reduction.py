"""Split reductions: if rows are few and long, several blocks of a GPU reduce each row."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import parser

from kernel_harness import run_model
from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.ep.device.open_device import OpenDevice
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.program.lowering.context import DeviceProperties

GPU = DeviceProperties(emulated=False)
TEXT = """<ir_version: 10, opset_import: ["" : 20]> rows
    (float[2, 3, 17011] x, float16[2, 3, 17011] h, float[3] w)
    => (float total, float16[2, 1, 1] means, int64[2, 3] best, float[2, 3, 1] logs, float[2, 3, 17011] norm)
    { total = ReduceSum<keepdims = 0>(x) tail = Constant<value_ints = [1, 2]>() last = Constant<value_ints = [2]>()
      means = ReduceMean(h, tail) best = ArgMax<axis = 2, keepdims = 0>(x) logs = ReduceLogSumExp(x, last)
      norm = InstanceNormalization(x, w, w) }"""


@pytest.mark.parametrize("dynamic", [False, True], ids=["known", "dynamic"])
def test_parts_of_rows(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    rng = np.random.default_rng(0)
    shape = (2, 3, 17011)
    x, w = rng.standard_normal(shape, np.float32), rng.standard_normal(3, np.float32)
    h = rng.uniform(1, 2, shape).astype(np.float16)
    x[0, 1, 17010] = x[1, 2, 5000] = 9
    total, means, best, logs, norm = run_model(parser.parse_model(TEXT), [x, h, w], dynamic)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(total, wide.sum(), rtol=1e-5, atol=1e-2)
    np.testing.assert_array_equal(means, h.astype(np.float64).mean((1, 2), keepdims=True).astype(np.float16))
    np.testing.assert_array_equal(best, x.argmax(2))
    np.testing.assert_allclose(logs, np.log(np.exp(wide).sum(2, keepdims=True)), rtol=1e-6)
    centered = wide - wide.mean(2, keepdims=True)
    scale = w[:, None] / np.sqrt((centered**2).mean(2, keepdims=True) + 1e-5)
    np.testing.assert_allclose(norm, centered * scale + w[:, None], rtol=1e-4, atol=1e-5)


ACROSS = """<ir_version: 10, opset_import: ["" : 20]> rows
    (float[17011, 3] x, float16[2, 17000, 5] h)
    => (float[1, 3] total, int64[3] best, float16[2, 5] most, float[17011, 3] soft)
    { first = Constant<value_ints = [0]>() second = Constant<value_ints = [1]>() total = ReduceSum(x, first)
      best = ArgMax<axis = 0, keepdims = 0>(x) most = ReduceMax<keepdims = 0>(h, second)
      soft = Softmax<axis = 0>(x) }"""


@pytest.mark.parametrize("dynamic", [False, True], ids=["known", "dynamic"])
def test_parts_of_rows_side_by_side(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    rng = np.random.default_rng(1)
    x, h = rng.standard_normal((17011, 3), np.float32), rng.standard_normal((2, 17000, 5)).astype(np.float16)
    x[17010, 0] = x[4000, 1] = x[16000, 1] = 9
    total, best, most, soft = run_model(parser.parse_model(ACROSS), [x, h], dynamic)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(total, wide.sum(0, keepdims=True), rtol=1e-5, atol=1e-2)
    np.testing.assert_array_equal(best, x.argmax(0))
    np.testing.assert_array_equal(most, h.max(1))
    np.testing.assert_allclose(soft, np.exp(wide) / np.exp(wide).sum(0), rtol=1e-5)


def launches(first: int, second: int, axis: int = 1) -> int:
    text = f"""<ir_version: 10, opset_import: ["" : 20]> rows (float[{first}, {second}] x) => (float[N] y)
        {{ axis = Constant<value_ints = [{axis}]>() y = ReduceSum<keepdims = 0>(x, axis) }}"""
    return len(CompiledCluster(read_model(parser.parse_model(text)), GPU).prepare().kernels)


def test_a_sum_of_everything_is_split_and_sums_of_many_rows_are_not() -> None:
    assert launches(1, 1 << 20) == 2
    assert launches(2000, 20000) == 1


def test_rows_side_by_side_are_split_where_they_are_few_and_long() -> None:
    """The first axis is reduced, so a block reduces several neighboring columns."""
    assert launches(12544, 32, axis=0) == 2
    assert launches(784, 32, axis=0) == 1
    assert launches(12544, 4096, axis=0) == 1
