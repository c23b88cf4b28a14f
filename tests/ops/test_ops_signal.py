"""Fourier transforms, window functions and CenterCropPad, compared with NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kernel_harness import run_op
from ort_cuda_plugin.abi.core import PluginError


def signal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)


def as_complex(x: np.ndarray) -> np.ndarray:
    return x[..., 0] + 1j * x[..., 1]


@pytest.mark.parametrize("length", [7, 12, 16])
def test_dft_cuts_or_extends_to_its_length(length: int) -> None:
    x = signal(2, 12, 2, 2)
    inputs = [x, np.array(length, np.int64), np.array(1, np.int64)]
    (y,) = run_op("DFT", inputs, constant=[1, 2])
    np.testing.assert_allclose(as_complex(y), np.fft.fft(as_complex(x), length, axis=1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [1, 31, 36, 64, 74, 127, 289, 400, 1000, 4096])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("inverse", [0, 1])
@pytest.mark.parametrize("dynamic", [False, True])
def test_dft_of_prime_and_composite_lengths(length: int, dtype: type[np.floating], inverse: int, dynamic: bool) -> None:
    x = np.random.default_rng(0).uniform(-1, 1, (2, length, 3, 2)).astype(dtype)
    inputs = [x, None, np.array(-3, np.int64)]
    (y,) = run_op("DFT", inputs, {"inverse": inverse}, constant=[2], dynamic=dynamic)
    expected = (np.fft.ifft if inverse else np.fft.fft)(as_complex(x.astype(np.float64)), axis=1)
    error = np.abs(as_complex(y) - expected).max() / np.abs(expected).max()
    assert error < 2 * float(np.finfo(dtype).eps) * (1 if dtype is np.float32 else math.log2(2 * length))


@pytest.mark.parametrize("inverse", [0, 1])
@pytest.mark.parametrize("dynamic", [False, True])
def test_dft_of_an_empty_signal_is_empty(inverse: int, dynamic: bool) -> None:
    inputs = [signal(2, 0, 3, 2), None, np.array(1, np.int64)]
    (y,) = run_op("DFT", inputs, {"inverse": inverse}, constant=[2], dynamic=dynamic)
    assert y.shape == (2, 0, 3, 2)


def test_one_side_of_the_dft_of_an_empty_signal_is_an_error() -> None:
    with pytest.raises(PluginError, match=r"DFT.*length of the transform must be at least 1"):
        run_op("DFT", [signal(2, 0, 1), None, np.array(1, np.int64)], {"onesided": 1}, constant=[2], dynamic=True)


def test_dft_of_a_long_signal_does_not_sum_all_of_it_for_each_frequency() -> None:
    x = np.random.default_rng(0).uniform(-1, 1, (1, 2**17, 1)).astype(np.float32)
    (y,) = run_op("DFT", [x, None, np.array(1, np.int64)], {"onesided": 1}, constant=[2])
    expected = np.fft.rfft(x[..., 0].astype(np.float64))
    assert np.abs(as_complex(y) - expected).max() < 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize("length", [8, 9, 100])
def test_inverse_dft_of_one_side_is_real(length: int) -> None:
    x = np.fft.rfft(signal(2, length), axis=1)
    parts = np.stack([x.real, x.imag], axis=-1).astype(np.float32)
    inputs: list[np.ndarray] = [parts, np.array(length, np.int64), np.array(1, np.int64)]
    (y,) = run_op("DFT", inputs, {"inverse": 1, "onesided": 1}, constant=[1, 2])
    np.testing.assert_allclose(y[..., 0], signal(2, length), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [8, 60])
@pytest.mark.parametrize("dynamic", [False, True])
def test_stft_of_windowed_frames(size: int, dynamic: bool) -> None:
    x, window = signal(2, 4 * size), signal(size)
    (y,) = run_op("STFT", [x, np.array(5, np.int64), window], dynamic=dynamic)
    frames = np.stack([x[:, start : start + size] for start in range(0, 3 * size + 1, 5)], axis=1)
    np.testing.assert_allclose(as_complex(y), np.fft.rfft(frames * window), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [(2, 9), (8, 3), (5, 5)])
def test_center_crop_pad(size: tuple[int, ...]) -> None:
    x = signal(5, 5)
    (y,) = run_op("CenterCropPad", [x, np.array(size, np.int64)], constant=[1])
    expected = x
    for axis, n in enumerate(size):
        cut = (5 - n) // 2 if n < 5 else 0
        expected = np.take(expected, range(cut, cut + min(n, 5)), axis)
        more = max(n - 5, 0)
        expected = np.pad(expected, [(more // 2, more - more // 2) if a == axis else (0, 0) for a in range(2)])
    np.testing.assert_array_equal(y, expected)


def test_a_signal_of_neither_real_nor_complex_numbers_names_the_node() -> None:
    with pytest.raises(PluginError, match=r"DFT.*must be 1 for real or 2 for complex"):
        run_op("DFT", [signal(2, 8, 3), None, np.array(1, np.int64)], constant=[2], dynamic=True)
