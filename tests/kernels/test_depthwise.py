"""Convolutions of each channel by itself, as a GPU gets them, against the CPU provider."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from contributed import noise
from kernel_harness import make_model, run_op
from ort_cuda_plugin.ep.open_device import OpenDevice
from ort_cuda_plugin.program.lowering import DeviceProperties
from test_matrix_conv import expected
from test_matrix_product import SMALL_GPU, kernels

GPU = DeviceProperties.gpu((9, 0))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize(
    ("image", "kernel", "attributes", "device"),
    [
        pytest.param((2, 64, 9, 11), (3, 3), {"pads": [1, 1, 1, 1]}, GPU, id="padded"),
        pytest.param((3, 24, 13, 8), (1, 3), {"pads": [0, 1, 0, 0], "strides": [2, 2]}, GPU, id="with steps"),
        pytest.param((1, 13, 7, 7), (5, 2), {"dilations": [1, 2]}, GPU, id="channels without vectors"),
        pytest.param((2, 16, 30), (5,), {"pads": [2, 2]}, GPU, id="lines"),
        pytest.param((1, 8, 4, 5, 6), (2, 3, 2), {"strides": [1, 2, 1]}, GPU, id="volumes"),
        pytest.param((2, 32, 17, 14), (3, 3), {"pads": [1, 1, 1, 1]}, SMALL_GPU, id="several places of a thread"),
    ],
)
def test_the_result_lies_in_the_order_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
    image: tuple[int, ...],
    kernel: tuple[int, ...],
    attributes: dict[str, Any],
    device: DeviceProperties,
    dtype: Any,
) -> None:
    channels = image[1]
    shapes = (image, (channels, 1, *kernel), (channels,))
    x, w, b = (noise(*shape, seed=i, scale=0.5).astype(dtype) for i, shape in enumerate(shapes))
    attributes = attributes | {"group": channels}
    monkeypatch.setattr(OpenDevice, "properties", lambda self: device)
    assert any("store_lanes" in spec.source for spec in kernels(make_model("Conv", [x, w, b], attributes), device))
    (actual,) = run_op("Conv", [x, w, b], attributes)
    if dtype is ml_dtypes.bfloat16:
        actual = actual.view(dtype)
    tolerance = {np.float16: 2e-3, np.float32: 1e-5}.get(dtype, 1.6e-2)
    np.testing.assert_allclose(actual.astype(np.float32), expected(x, w, b, attributes), tolerance, tolerance)
