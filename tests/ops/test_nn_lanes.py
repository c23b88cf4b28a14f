"""Products of few rows: in vectors of the emulated device, and in a GPU's blocks."""

from __future__ import annotations

import numpy as np
import pytest

from kernel_harness import run_op
from nn_reference import noise
from ort_cuda_plugin.ep.open_device import OpenDevice
from ort_cuda_plugin.program.lowering import DeviceProperties


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize(
    ("dtype", "rows", "columns", "emulated"),
    [("float32", 3, 157, True), ("float16", 2, 10, True), ("float64", 1, 70, True), ("float32", 3, 157, False)],
)
def test_products_of_few_rows(
    monkeypatch: pytest.MonkeyPatch, dtype: str, rows: int, columns: int, emulated: bool, transposed: int
) -> None:
    """Strips of columns and of k that do not divide them, with a bias that each element gets once."""
    monkeypatch.setattr(OpenDevice, "properties", lambda self: DeviceProperties(emulated=emulated))
    a, b, c = noise(1, (rows, 75), dtype), noise(2, (75, columns), dtype), noise(3, (columns,), dtype)
    given = np.ascontiguousarray(b.T) if transposed else b
    (actual,) = run_op("Gemm", [a, given, c], {"transB": transposed}, constant=[1])
    expected = a.astype(np.float64) @ b.astype(np.float64) + c
    tolerance = {"float16": 2e-3, "float32": 1e-5, "float64": 1e-12}[dtype]
    np.testing.assert_allclose(actual, expected, tolerance, 10 * tolerance)
