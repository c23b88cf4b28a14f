"""Tiled transpose through shared memory on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import parser

from kernel_harness import run_model
from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.ep.device.open_device import OpenDevice
from ort_cuda_plugin.kernels.elementwise.transposed_map import SIDE
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.program.lowering.context import DeviceProperties

GPU = DeviceProperties(emulated=False)
SHAPE = (3, 40, 70)
TEXT = """<ir_version: 10, opset_import: ["" : 21]> transposes
    (float[3, 40, 70] x, float[3, 70, 40] z, float[40] b, float16[3, 40, 70] h, bool[3, 40, 70] c)
    => (float[3, 70, 40] sums, float16[3, 70, 40] halves, bool[70, 3, 40] flags)
    { t = Transpose<perm = [0, 2, 1]>(x) s = Mul(t, z) sums = Add(s, b)
      u = Transpose<perm = [0, 2, 1]>(h) halves = Neg(u)
      v = Transpose<perm = [2, 0, 1]>(c) flags = Not(v) }"""


def model() -> Any:
    return parser.parse_model(TEXT)


@pytest.mark.parametrize("dynamic", [False, True], ids=["known", "dynamic"])
def test_transposes(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    rng = np.random.default_rng(0)
    x, z = rng.standard_normal(SHAPE, np.float32), rng.standard_normal((3, 70, 40), np.float32)
    b, h = rng.integers(-4, 5, 40).astype(np.float32), rng.standard_normal(SHAPE).astype(np.float16)
    sums, halves, flags = run_model(model(), [x, z, b, h, x > 0], dynamic)
    wide = x.transpose(0, 2, 1).astype(np.float64) * z + b
    np.testing.assert_allclose(sums, wide, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(halves, -h.transpose(0, 2, 1))
    np.testing.assert_array_equal(flags, ~(x > 0).transpose(2, 0, 1))


def test_what_is_transposed_has_a_tile_and_the_rest_has_none() -> None:
    kernels = CompiledCluster(read_model(model()), GPU).prepare().kernels
    # One kernel computes the first two results.
    assert [spec.source.count("cuda.shared.array") for spec in kernels] == [2, 1]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_column_of_a_tile_lies_on_different_banks(size: int) -> None:
    # A warp accesses elements of 8 bytes in two halves anyway.
    turns = [range(start, start + 32 * 4 // max(size, 4)) for start in range(0, 32, 32 * 4 // max(size, 4))]
    for lanes in turns:
        words = {lane * (SIDE + 1) * size // 4 for lane in lanes}
        assert len({word % 32 for word in words}) >= len(words) / 2
