"""com.microsoft's elementwise and row operators, compared with the CPU provider. test_contrib_types has the others."""

from __future__ import annotations

import numpy as np
import pytest

from contributed import FLOAT, check_node, noise


@pytest.mark.parametrize("upper", [0, 1])
def test_trilu(upper: int) -> None:
    check_node("Trilu", [noise(2, 4, 5), np.array(-1)], {"upper": upper}, reals=[FLOAT], constant=[1])


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_grid_sample(mode: str) -> None:
    attributes = {"mode": mode, "padding_mode": "zeros" if mode == "bicubic" else "border", "align_corners": 1}
    check_node("GridSample", [noise(2, 3, 5, 4), noise(2, 6, 7, 2, seed=1)], attributes, reals=[FLOAT], tolerance=1e-4)


def test_gated_rms_norm() -> None:
    inputs = [noise(2, 3, 12), noise(4, seed=1), noise(2, 3, 12, seed=2)]
    check_node("GatedRMSNorm", inputs, {"activation": "silu"}, reals=[FLOAT])
