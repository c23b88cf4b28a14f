"""NCHW to NHWC conversion of images with few channels, by vectors of pixels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import parser

from kernel_harness import run_model
from ort_cuda_plugin.ep.device.open_device import OpenDevice
from ort_cuda_plugin.program.lowering.context import DeviceProperties
from test_mma_gemm import kernels

GPU = DeviceProperties(emulated=False)
TEXT = """<ir_version: 10, opset_import: ["" : 21]> images
    (float16[N, 3, 12, 24] h, float[N, 2, 5, 12] x, uint8[N, 4, 8, 40] u, float16[N, 3, 13, 25] o)
    => (float16[N, 12, 24, 3] colors, float[N, 5, 12, 2] pairs, float[N, 8, 40, 4] bytes, float16[N, 13, 25, 3] odd)
    { colors = Transpose<perm = [0, 2, 3, 1]>(h)
      m = Transpose<perm = [0, 2, 3, 1]>(x) two = Constant<value_float = 2.0>() n = Exp(m) pairs = Mul(n, two)
      v = Transpose<perm = [0, 2, 3, 1]>(u) bytes = Cast<to = 1>(v)
      odd = Transpose<perm = [0, 2, 3, 1]>(o) }"""


def fed(images: int) -> list[Any]:
    rng = np.random.default_rng(0)
    h, o = (rng.standard_normal((images, 3, *size)).astype(np.float16) for size in ((12, 24), (13, 25)))
    x = rng.standard_normal((images, 2, 5, 12), np.float32)
    return [h, x, rng.integers(0, 256, (images, 4, 8, 40)).astype(np.uint8), o]


@pytest.mark.parametrize("dynamic", [False, True], ids=["known", "dynamic"])
def test_channels_come_last(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    h, x, u, o = fed(9)
    model = parser.parse_model(TEXT if dynamic else TEXT.replace("[N", "[9"))
    colors, pairs, numbers, odd = run_model(model, [h, x, u, o], dynamic)
    np.testing.assert_array_equal(colors, h.transpose(0, 2, 3, 1))
    np.testing.assert_allclose(pairs, 2 * np.exp(x.transpose(0, 2, 3, 1)), rtol=1e-6)
    np.testing.assert_array_equal(numbers, u.transpose(0, 2, 3, 1).astype(np.float32))
    np.testing.assert_array_equal(odd, o.transpose(0, 2, 3, 1))


def test_planes_whose_places_are_whole_vectors_are_read_by_them() -> None:
    sources = [spec.source for spec in kernels(parser.parse_model(TEXT.replace("[N", "[9")), GPU)]
    widths = [line.split(", ")[-2:] for source in sources for line in source.splitlines() if "load_lanes(" in line]
    assert sorted(widths) == [["4", "2)"], ["4", "4)"], ["8", "3)"]]
