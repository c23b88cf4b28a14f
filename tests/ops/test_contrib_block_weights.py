"""GEMMs with 4-bit and 8-bit weights, and quantized attention, compared with the CPU provider or NumPy."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from contributed import FLOAT, Array, check_node, codes, noise
from emulator_harness import configured
from ort_cuda_plugin.abi.emulation import findings

FEW, MANY = 3, 20
SIZED = range(1)


@pytest.fixture(autouse=True)
def checked() -> Iterator[None]:
    """Run each test in the checking mode with adversarial streams; fail if there are findings."""
    with configured(adversarial=1, check=1, seed=7):
        yield
        assert findings() == []


@pytest.mark.parametrize(("kind", "count", "width"), [(0, FEW, 48), (1, MANY, 37)])
def test_matmul_bnb4_equals_the_cpu_provider(kind: int, count: int, width: int) -> None:
    """With rows of 37 elements, blocks of 16 elements cross the ends of rows."""
    columns, block = 7, 16
    b, scales = codes((width * columns + 1) // 2), np.abs(noise(-(-width * columns // block)))
    attributes = {"K": width, "N": columns, "block_size": block, "quant_type": kind}
    inputs = [noise(2, count, width), b, scales]
    check_node("MatMulBnb4", inputs, attributes, constant=[1, 2], sized=SIZED, reals=[FLOAT], tolerance=1e-4)


def test_matmul_bnb4_of_weights_that_are_not_turned() -> None:
    rows, columns, block = 20, 32, 16
    b, scales = codes(rows * columns // 2), np.abs(noise(rows * columns // block))
    attributes = {"K": columns, "N": rows, "block_size": block, "quant_type": 1}
    eye = noise(rows, columns)
    whole: list[Array] = []

    def keep(_: int, y: Array) -> Array:
        whole.append(y)
        return y

    identity = np.eye(columns, dtype=np.float32)
    check_node("MatMulBnb4", [identity, b, scales], attributes, constant=[1, 2], sized=SIZED, reals=[FLOAT], part=keep)
    made = lambda a, *_: (a @ whole[-1].T).astype(np.float32)  # noqa: E731
    check_node(
        "MatMulBnb4",
        [eye.T.copy(), b, scales],
        {**attributes, "transB": 0},
        constant=[1, 2],
        sized=SIZED,
        reals=[FLOAT],
        reference=made,
    )


@pytest.mark.parametrize("stored", [ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn])
def test_gather_block_quantized_of_floats(stored: type[np.generic]) -> None:
    data = noise(6, 32).astype(stored)
    scales = noise(1, 2, seed=1) if stored is ml_dtypes.float8_e5m2 else noise(6, 1, seed=1)
    block = 16 if stored is ml_dtypes.float8_e5m2 else 0
    wide = data.astype(np.float32) * np.repeat(scales, 32 // scales.shape[1], 1)
    indices = np.array([[0, 5, -1], [2, 7, 3]])

    def reference(*_: Array) -> Array:
        result: Array = np.where((indices < 6)[..., None], wide[np.minimum(indices, 5)], np.float32(0))
        return result

    attributes = {"block_size": block, "quantize_axis": 1, "gather_axis": 0}
    inputs = [data, indices, scales]
    check_node(
        "GatherBlockQuantized", inputs, attributes, constant=[0, 2], reals=[FLOAT], reference=reference, sized=[1]
    )
