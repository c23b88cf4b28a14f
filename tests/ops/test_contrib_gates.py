"""Maps and rows of com.microsoft against the CPU provider, complex products against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from contributed import BFLOAT16, FLOAT, FLOAT16, Array, check_node, noise, number


@pytest.mark.parametrize("upper", [0, 1])
def test_trilu(upper: int) -> None:
    check_node("Trilu", [noise(2, 4, 5), np.array(-1)], {"upper": upper}, reals=[FLOAT], constant=[1])


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_grid_sample(mode: str) -> None:
    attributes = {"mode": mode, "padding_mode": "zeros" if mode == "bicubic" else "border", "align_corners": 1}
    check_node("GridSample", [noise(2, 3, 5, 4), noise(2, 6, 7, 2, seed=1)], attributes, reals=[FLOAT], tolerance=1e-4)


def test_scaled_silu() -> None:
    check_node("ScaledSiLU", [noise(3, 5)], {"alpha": 0.7}, reals=[FLOAT, BFLOAT16])
    check_node("ScaledSiLU", [noise(3, 5), number(1.5)], {}, reals=[FLOAT, FLOAT16])


def test_gated_add() -> None:
    check_node("GatedAdd", [noise(2, 3, 5), noise(2, 3, 5, seed=1), noise(2, 3, 1, seed=2)], reals=[FLOAT, FLOAT16])


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_gated_rms_norm(activation: str) -> None:
    inputs = [noise(2, 3, 12), noise(4, seed=1), noise(2, 3, 12, seed=2)]
    check_node("GatedRMSNorm", inputs, {"activation": activation}, reals=[FLOAT, FLOAT16])


@pytest.mark.parametrize("name", ["ComplexMul", "ComplexMulConj"])
def test_complex_products(name: str) -> None:
    def reference(a: Array, b: Array) -> Array:
        x, y = a[..., 0] + 1j * a[..., 1], b[..., 0] + 1j * b[..., 1]
        z = x * (y.conj() if name == "ComplexMulConj" else y)
        result: Array = np.stack([z.real, z.imag], -1).astype(np.float32)
        return result

    check_node(name, [noise(2, 3, 2), noise(3, 2, seed=1)], reference=reference, reals=[FLOAT, FLOAT16])
