"""Products with weights of 4 and 8 bits, and attention of quantized numbers: against the CPU provider or NumPy."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from contributed import BFLOAT16, FLOAT, FLOAT16, Array, check_node, codes, noise, number
from contributed_codes import packed
from emulator_harness import configured
from ort_cuda_plugin.conformance.mode import findings

FEW, MANY = 3, 20
SIZED = range(1)


@pytest.fixture(autouse=True)
def checked() -> Iterator[None]:
    """Kernels check every access, and streams run at any time."""
    with configured(adversarial=1, check=1, seed=7):
        yield
        assert findings() == []


@pytest.mark.parametrize(("kind", "count", "width"), [(0, FEW, 48), (1, MANY, 37)])
def test_matmul_bnb4_equals_the_cpu_provider(kind: int, count: int, width: int) -> None:
    """Of 37 elements in a row, blocks begin and end anywhere."""
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


def test_matmul_of_fp4_weights() -> None:
    columns, width, block = 6, 40, 16
    values = noise(columns, width, scale=2.0).astype(ml_dtypes.float4_e2m1fn)
    scales = np.abs(noise(columns, -(-width // block), seed=1)).astype(ml_dtypes.float8_e4m3fn)
    wide = np.repeat(scales.astype(np.float32), block, 1)[:, :width] * np.float32(0.5)
    numbers = values.astype(np.float32) * wide
    given = packed(values.view(np.uint8).astype(np.int64), 4)
    inputs = [noise(FEW, width), given, scales.view(np.uint8), number(0.5), number(2.0), noise(columns, seed=3)]
    check_node(
        "MatMulBlockQuantizedFp4Weight",
        inputs,
        {},
        constant=[1, 2],
        wide=[3, 4],
        sized=SIZED,
        reals=[BFLOAT16],
        reference=lambda a, *rest: (a @ numbers.T + rest[-1]).astype(np.float32),
    )


def test_matmul_of_fp8_weights() -> None:
    columns, width, block = 6, 40, 24
    values, scales = noise(columns, width).astype(ml_dtypes.float8_e4m3fn), np.abs(noise(columns, 2, seed=1))
    numbers = values.astype(np.float32) * np.repeat(scales, block, 1)[:, :width]

    def reference(a: Array, *rest: Array) -> Array:
        a = (a / rest[2]).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * rest[2]
        result: Array = (a @ numbers.T + rest[-1]).astype(np.float32)
        return result

    inputs = [noise(FEW, width), values, scales, number(0.125), noise(columns, seed=3)]
    check_node(
        "MatMulBlockQuantizedFp8Weight",
        inputs,
        {"block_size": block},
        constant=[1, 2],
        wide=[2, 3],
        sized=SIZED,
        reals=[FLOAT16],
        reference=reference,
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


def test_qattention_equals_the_cpu_provider() -> None:
    """With a scale for each column, a mask and a past."""
    batch, rows, width, heads = 2, 3, 8, 2
    inputs = [
        codes(batch, rows, width), codes(width, 3 * width, dtype=np.int8), noise(3 * width), number(0.02),
        np.abs(noise(3 * width, seed=2)) * np.float32(0.01), np.array([[1] * 5, [1, 1, 1, 1, 0]], np.int32),
        np.array(120, np.uint8), np.zeros(3 * width, np.int8), noise(2, batch, heads, 2, width // heads, seed=4),
    ]  # fmt: skip
    attributes = {"num_heads": heads, "unidirectional": 1}
    check_node(
        "QAttention",
        inputs,
        attributes,
        [FLOAT, FLOAT],
        constant=[1, 4, 7],
        reals=[FLOAT],
        tolerance=1e-3,
        sized=range(9),
    )
