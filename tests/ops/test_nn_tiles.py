"""GEMM tiles of a GPU and of the emulated device: the order of summation is equal, so the results have equal bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from kernel_harness import Array, run_op
from nn_reference import noise
from ort_cuda_plugin.kernels.gemm import tile_shapes
from ort_cuda_plugin.schedule.conv import DIRECT_ROWS


def both_forms(
    monkeypatch: pytest.MonkeyPatch, op_type: str, inputs: list[Array], attributes: Mapping[str, Any], constant: bool
) -> tuple[Array, Array]:
    """Return the results with the emulated device's own tiles and with a GPU's SIMT tiles."""
    weights = [1] if constant else []
    (own,) = run_op(op_type, inputs, attributes, constant=weights)
    monkeypatch.setattr(tile_shapes, "EMULATED_TILES", tile_shapes.SIMT_TILES)
    (other,) = run_op(op_type, inputs, attributes, constant=weights)
    return own, other


@pytest.mark.parametrize("rows", [7, 20, 40, 150])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
def test_products_have_the_same_bits(monkeypatch: pytest.MonkeyPatch, rows: int, dtype: str) -> None:
    inputs = [noise(1, (rows, 37), dtype), noise(2, (37, 75), dtype)]
    own, other = both_forms(monkeypatch, "MatMul", inputs, {}, constant=False)
    np.testing.assert_array_equal(own, other)
    assert np.abs(own).max() > 0


@pytest.mark.parametrize("transposed", [(0, 1), (1, 0), (1, 1)])
def test_products_of_transposed_matrices_have_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, transposed: tuple[int, int]
) -> None:
    a, b = noise(1, (43, 35)), noise(2, (35, 70))
    inputs = [np.ascontiguousarray(x.T) if flag else x for x, flag in zip((a, b), transposed, strict=True)]
    attributes = dict(zip(("transA", "transB"), transposed, strict=True))
    own, other = both_forms(monkeypatch, "Gemm", inputs, attributes, constant=False)
    np.testing.assert_array_equal(own, other)


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize(
    ("x", "w", "attributes"),
    [
        pytest.param((2, 5, 19, 33), (40, 5, 3, 3), {"pads": [1, 1, 1, 1]}, id="padded"),
        pytest.param((1, 5, 9, 40), (70, 5, 3, 3), {"strides": [2, 2]}, id="strided"),
        pytest.param((1, 5, 12, 40), (20, 5, 2, 3), {"dilations": [2, 3], "pads": [0, 3, 1, 0]}, id="dilated"),
        pytest.param((2, 18, 9, 13), (33, 18, 1, 1), {}, id="pointwise"),
        pytest.param((2, 18, 9, 13), (33, 18, 1, 1), {"pads": [1, 0, 0, 1]}, id="pointwise and padded"),
        pytest.param((2, 18, 9, 14), (34, 9, 1, 1), {"group": 2}, id="pointwise in groups"),
        pytest.param((1, 6, 7, 9), (40, 3, 3, 3), {"group": 2, "pads": [1, 1, 1, 1]}, id="in groups"),
        pytest.param((1, 3, 5, 6, 20), (17, 3, 2, 3, 3), {"pads": [1, 1, 1, 0, 1, 1]}, id="in three dimensions"),
        pytest.param((1, 20, 50), (20, 20, 3), {"pads": [1, 1]}, id="in one dimension"),
    ],
)
def test_convolutions_have_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
    x: tuple[int, ...],
    w: tuple[int, ...],
    attributes: dict[str, Any],
    constant: bool,
) -> None:
    assert w[0] // attributes.get("group", 1) > DIRECT_ROWS
    own, other = both_forms(monkeypatch, "Conv", [noise(1, x), noise(2, w)], attributes, constant)
    np.testing.assert_array_equal(own, other)
    assert np.abs(own).max() > 0


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_convolutions_of_each_type_have_the_same_bits(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    inputs = [noise(1, (1, 5, 19, 33), dtype), noise(2, (40, 5, 3, 3), dtype)]
    own, other = both_forms(monkeypatch, "Conv", inputs, {}, constant=True)
    np.testing.assert_array_equal(own, other)
