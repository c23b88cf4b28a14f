"""Row programs on a GPU keep values that several passes over a row need in registers or shared memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import parser

from kernel_harness import run_model
from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.ep.device.open_device import OpenDevice
from ort_cuda_plugin.kernels.codegen.row_cache import find_row_cache
from ort_cuda_plugin.kernels.reduction import row_columns
from ort_cuda_plugin.model.ir import DType
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.program.expressions import scalar as s
from ort_cuda_plugin.program.expressions.scalar import Scalar
from ort_cuda_plugin.program.lowering.context import DeviceProperties
from ort_cuda_plugin.program.steps.row_program import MAX, SUM, Row

GPU = DeviceProperties(emulated=False)
PROGRAMS = {
    "layer_norm": "s = Add(x, x2) y = LayerNormalization(s, w, w)",
    "softmax": "y = Softmax<axis = -1>(x)",
    "first_axis": "y = Softmax<axis = 0>(x)",
    "scaled": "p = Mul(x, x2) m = ReduceMean<keepdims = 1>(p, last) d = Sub(p, m) y = Mul(d, x)",
    "exact": "h = Cast<to = 10>(x) g = Softmax<axis = -1>(h) y = Cast<to = 1>(g)",
}
SHAPES = [(70, 7), (9, 33), (3, 3001)]
"""Shapes whose rows are computed by a thread, a warp and a block each."""
FORMS = [*((program, shape, "known") for program in PROGRAMS for shape in SHAPES), ("softmax", (9, 33), "dynamic")]


def model(program: str, rows: int | str, columns: int | str, static: int) -> Any:
    text = f"""<ir_version: 10, opset_import: ["" : 20]> rows
        (float[{rows}, {columns}] x, float[{rows}, {columns}] x2, float[{static}] w) => (float[{rows}, {columns}] y)
        {{ last = Constant<value_ints = [-1]>() {program} }}"""
    return parser.parse_model(text)


@pytest.mark.parametrize(("program", "shape", "sizes"), FORMS)
def test_what_is_kept_changes_no_bit(
    program: str, shape: tuple[int, int], sizes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(size).astype(np.float32) for size in (shape, shape, shape[1:])]
    results = []
    for most in (row_columns.CACHE_BYTES, 0):
        monkeypatch.setattr(row_columns, "CACHE_BYTES", most)
        results += run_model(model(PROGRAMS[program], *shape, shape[1]), inputs, sizes == "dynamic")
    kept, read_again = results
    np.testing.assert_array_equal(kept, read_again)


def times(program: str, rows: int, columns: int) -> float:
    """Return how often the inputs are read: the bytes that kernels read, divided by the inputs' bytes."""
    cluster = CompiledCluster(read_model(model(PROGRAMS[program], rows, columns, columns)), GPU)
    cluster.prepare()
    assert cluster.traffic is not None
    return cluster.traffic.asked.read / cluster.traffic.compulsory.read


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_fits_is_read_once(program: str) -> None:
    assert [times(program, rows, columns) for rows, columns in [(9, 33), (6, 384), (3, 3001)]] == [1, 1, 1]
    assert times(program, 9000, 60000) > 1.5


def test_only_the_last_common_values_are_kept() -> None:
    row = Row()
    x = Scalar(DType.FLOAT32, "leaf")
    mean = row.mean(x)
    centered = x - mean
    deviation = s.sqrt(row.mean(centered * centered))
    kept = find_row_cache([[x], [centered * centered], [centered / deviation]], lambda leaf: leaf is x)
    assert kept.count == 1
    assert (kept.stored(0), kept.loaded(1), kept.stored(1), kept.loaded(2)) == ([x], [x], [centered], [centered])


def test_a_product_that_a_sum_may_take_in_is_not_kept() -> None:
    row = Row()
    x, y = Scalar(DType.FLOAT32, "leaf"), Scalar(DType.FLOAT32, "leaf")
    product = x * y
    most = row.reduce(MAX, product)
    kept = find_row_cache([[product], [product - most]], lambda leaf: True)
    assert set(kept.slots) == {x, y}
    total = row.reduce(SUM, s.exp(product - most))
    assert find_row_cache([[product], [s.exp(product - most)], [total + x]], lambda leaf: leaf is x).loaded(2) == [x]
