"""Fourier transforms, windows and centred crops, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from kernel_harness import run_op


def signal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)


def as_complex(x: np.ndarray) -> np.ndarray:
    return x[..., 0] + 1j * x[..., 1]


@pytest.mark.parametrize("length", [7, 12, 16])
def test_dft_cuts_or_extends_to_its_length(length):
    x = signal(2, 12, 2, 2)
    inputs = [x, np.array(length, np.int64), np.array(1, np.int64)]
    (y,) = run_op("DFT", inputs, constant=[1, 2])
    np.testing.assert_allclose(as_complex(y), np.fft.fft(as_complex(x), length, axis=1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [8, 9])
def test_inverse_dft_of_one_side_is_real(length):
    x = np.fft.rfft(signal(2, length), axis=1)
    parts = np.stack([x.real, x.imag], axis=-1).astype(np.float32)
    inputs = [parts, np.array(length, np.int64), np.array(1, np.int64)]
    (y,) = run_op("DFT", inputs, {"inverse": 1, "onesided": 1}, constant=[1, 2])
    np.testing.assert_allclose(y[..., 0], signal(2, length), rtol=1e-5, atol=1e-5)


def test_stft_of_windowed_frames():
    x, window = signal(2, 32), signal(8)
    (y,) = run_op("STFT", [x, np.array(5, np.int64), window], dynamic=True)
    frames = np.stack([x[:, start : start + 8] for start in range(0, 25, 5)], axis=1)
    np.testing.assert_allclose(as_complex(y), np.fft.rfft(frames * window), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [(2, 9), (8, 3), (5, 5)])
def test_center_crop_pad(size):
    x = signal(5, 5)
    (y,) = run_op("CenterCropPad", [x, np.array(size, np.int64)], constant=[1])
    expected = x
    for axis, n in enumerate(size):
        cut = (5 - n) // 2 if n < 5 else 0
        expected = np.take(expected, range(cut, cut + min(n, 5)), axis)
        more = max(n - 5, 0)
        expected = np.pad(expected, [(more // 2, more - more // 2) if a == axis else (0, 0) for a in range(2)])
    np.testing.assert_array_equal(y, expected)
