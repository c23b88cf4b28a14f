"""Scans, sorts and suppressions of long rows on a GPU."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from onnx import parser

import ort_cuda_plugin
from kernel_harness import Array, make_model, run_model, run_op
from ort_cuda_plugin.ep.device.open_device import OpenDevice
from ort_cuda_plugin.kernels.scan_sort import block_scan
from ort_cuda_plugin.program.lowering.context import DeviceProperties

GPU = DeviceProperties(emulated=False)
SCANS = """<ir_version: 10, opset_import: ["" : 20]> scans
    (float[3, 1500] x, int64[2, 20001] i, float16[300, 5] h)
    => (float[3, 1500] sums, int64[2, 20001] before, int64[2, 20001] back, float16[300, 5] columns)
    { zero = Constant<value_int = 0>() one = Constant<value_int = 1>()
      sums = CumSum(x, one) before = CumSum<exclusive = 1>(i, one)
      back = CumSum<exclusive = 1, reverse = 1>(i, one) columns = CumSum<reverse = 1>(h, zero) }"""


@pytest.mark.parametrize(
    ("dynamic", "most_parts"), [(False, 1280), (True, 1280), (True, 1)], ids=["known", "dynamic", "launches"]
)
def test_scans(dynamic: bool, most_parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch with decoupled look-back, or three launches if MOST_PARTS is 1."""
    monkeypatch.setattr(block_scan, "MOST_PARTS", most_parts)
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    rng = np.random.default_rng(0)
    x, i = rng.standard_normal((3, 1500), np.float32), rng.integers(-(2**60), 2**60, (2, 20001))
    h = rng.integers(-2, 3, (300, 5)).astype(np.float16)
    sums, before, back, columns = run_model(parser.parse_model(SCANS), [x, i, h], dynamic)
    np.testing.assert_allclose(sums, x.astype(np.float64).cumsum(1), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(before, i.cumsum(1) - i)
    np.testing.assert_array_equal(back, i[:, ::-1].cumsum(1)[:, ::-1] - i)
    np.testing.assert_array_equal(columns, h[::-1].cumsum(0)[::-1])


def test_a_graph_draws_its_parts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    session = ort_cuda_plugin.session(parser.parse_model(SCANS).SerializeToString(), emulate=True)
    rng = np.random.default_rng(0)
    before = ort_cuda_plugin.counters()["graph_replays"]
    for _ in range(8):
        i = rng.integers(-(2**60), 2**60, (2, 20001))
        feeds = {"x": np.zeros((3, 1500), np.float32), "i": i, "h": np.zeros((300, 5), np.float16)}
        np.testing.assert_array_equal(session.run(["before"], feeds)[0], i.cumsum(1) - i)
    assert ort_cuda_plugin.counters()["graph_replays"] > before


SORTS = """<ir_version: 10, opset_import: ["" : 20]> sorts
    (float[2, 3000] x, int32[5000] i, bool[9000] c)
    => (float[2, 2100] top, int64[2, 2100] places, int32[U] unique, int64[1, W] where)
    { k = Constant<value_ints = [2100]>() top, places = TopK<axis = -1>(x, k)
      unique = Unique<sorted = 1>(i) where = NonZero(c) }"""


def test_sorts_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    rng = np.random.default_rng(1)
    x = rng.integers(-500, 500, (2, 3000)).astype(np.float32)
    x[1, 77] = np.nan
    i, c = rng.integers(0, 400, 5000).astype(np.int32), rng.integers(0, 2, 9000).astype(bool)
    top, places, unique, where = run_model(parser.parse_model(SORTS), [x, i, c])
    order = np.argsort(-np.where(np.isnan(x), np.inf, x), axis=1, kind="stable")[:, :2100]
    np.testing.assert_array_equal(places, order)
    np.testing.assert_array_equal(top, np.take_along_axis(x, order, 1))
    np.testing.assert_array_equal(unique, np.unique(i))
    np.testing.assert_array_equal(where, [np.flatnonzero(c)])


def test_suppression_by_pieces_equals_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are two boxes more than a block has threads; some have no area, are equal or have NaN coordinates."""
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    rng = np.random.default_rng(2)
    boxes, scores = rng.random((1, 1026, 4), np.float32), rng.integers(0, 99, (1, 2, 1026)).astype(np.float32) / 99
    boxes[0, :40:5], boxes[0, 1:40:5], boxes[0, 2:40:5] = np.nan, 0, boxes[0, 2]
    limits = np.array([1026]), np.array([0.5], np.float32), np.array([0.01], np.float32)
    inputs: list[Array | None] = [boxes, scores, *limits]
    model = make_model("NonMaxSuppression", inputs)
    model.ir_version = 10
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {f"x{number}": x for number, x in enumerate(inputs)})
    (actual,) = run_op("NonMaxSuppression", inputs, constant=(2, 3))
    assert len(expected) > 200
    np.testing.assert_array_equal(actual, expected)
