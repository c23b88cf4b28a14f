"""Checks of the kernels of tests/ptx/foreign: each function launches one kernel of a module, and compares with NumPy.

The folder has sources in CUDA C++ and Triton, and PTX that NVRTC and Triton compiled from some of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ort_cuda_plugin.emulator import PtxModule

Check = Callable[[PtxModule], None]
CHECKS: dict[str, Check] = {}
"""The check of each kernel, by kernel name."""


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def random() -> np.random.Generator:
    return np.random.default_rng(11)


# ---- CUDA C++ ----


@check
def reverse_in_shared(module: PtxModule) -> None:
    x, y = np.arange(1, 101, dtype=np.float32), np.zeros(100, np.float32)
    module.launch("reverse_in_shared", 2, 64, (x, y, 100), shared=256)
    padded = np.concatenate([x, np.zeros(28, np.float32)]).reshape(2, 64)[:, ::-1].reshape(-1)
    np.testing.assert_array_equal(y, padded[:100])


@check
def histogram(module: PtxModule) -> None:
    x, bins = random().integers(0, 256, 3000, np.uint8), np.zeros(256, np.uint32)
    module.launch("histogram", 3, 96, (x, bins, 3000))
    np.testing.assert_array_equal(bins, np.bincount(x, minlength=256))


@check
def sum_rows(module: PtxModule) -> None:
    x, y = random().standard_normal((3, 700)).astype(np.float32), np.zeros(3, np.float32)
    module.launch("sum_rows", 3, 128, (x, y, 700))
    np.testing.assert_allclose(y, x.sum(1), rtol=1e-5, atol=1e-5)


@check
def compact(module: PtxModule) -> None:
    x = random().integers(-5, 6, 200).astype(np.int32)
    y, count = np.zeros(200, np.int32), np.zeros(1, np.uint32)
    module.launch("compact", 2, 128, (x, y, count, 200))
    assert count[0] == (x > 0).sum()
    np.testing.assert_array_equal(np.sort(y[: count[0]]), np.sort(x[x > 0]))


@check
def by_struct(module: PtxModule) -> None:
    x, y = np.arange(40, dtype=np.float32), np.zeros(40, np.float32)
    numbers = (np.float32(3), np.int32(40), np.float64(0.5), np.int32(1), np.int32(2), np.int32(7))
    module.launch("by_struct", 2, 32, ((x, y, *numbers),))
    np.testing.assert_array_equal(y, 3 * x + np.float32(7.5))


@check
def count_and_limits(module: PtxModule) -> None:
    x = random().integers(-50, 70, 64).astype(np.int32)
    out = np.zeros(8 + 64, np.int32)
    for has_77 in (0, 1):
        x[5] = 77 if has_77 else 70
        out[:] = 0
        module.launch("count_and_limits", 1, 64, (x, out, 64))
        assert list(out[:5]) == [(x > 0).sum(), has_77, 1, x.sum(), min(0, x.min())]
    for lane in range(64):
        warp = lane // 32 * 32
        same = sum(1 << other for other in range(32) if (x[warp + other] & 3) == (x[lane] & 3))
        assert int(out[8 + lane]) & 0xFFFFFFFF == same


def bfloat16(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return float32 values rounded to bfloat16, as their upper 16 bits."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@check
def halves(module: PtxModule) -> None:
    x = random().standard_normal((50, 2)).astype(np.float16)
    b = bfloat16(random().standard_normal((50, 2)))
    y, c, total = np.zeros_like(x), np.zeros_like(b), np.zeros(1, np.float16)
    module.launch("halves", 1, 64, (x, b, y, c, total, 50))
    v = (x.astype(np.float64) ** 2 + 0.5).astype(np.float16)
    np.testing.assert_allclose(y, np.maximum(v, np.exp(-x.astype(np.float32))), rtol=2e-3)
    wide = from_bfloat16(b).astype(np.float64)
    np.testing.assert_allclose(from_bfloat16(c), wide + wide**2, rtol=2e-2, atol=2e-2)
    np.testing.assert_allclose(total[0], v[:, 0].astype(np.float32).sum(), rtol=2e-2)


def eight_bits(bits: npt.NDArray[Any], mantissa: int, bias: int) -> npt.NDArray[Any]:
    """Return the numbers of 8-bit floats that are neither infinite nor NaN."""
    exponent, fraction = (bits & 0x7F) >> mantissa, bits & (1 << mantissa) - 1
    normal = (1 + fraction / (1 << mantissa)) * 2.0 ** (exponent.astype(int) - bias)
    size = np.where(exponent == 0, fraction / (1 << mantissa) * 2.0 ** (1 - bias), normal)
    return np.where(bits & 0x80, -size, size)


def nearest_eight_bits(values: npt.NDArray[Any], mantissa: int, bias: int, largest: int) -> npt.NDArray[Any]:
    """Round to the nearest 8-bit float with a code up to ``largest``; ties round to even codes."""
    codes = np.arange(largest + 1)
    numbers = eight_bits(codes, mantissa, bias)
    distance = np.abs(np.abs(values.astype(np.float64))[..., None] - numbers) + (codes & 1) * 1e-12
    result: npt.NDArray[Any] = np.copysign(numbers[distance.argmin(-1)], values)
    return result


@check
def quantize(module: PtxModule) -> None:
    x = (random().standard_normal((60, 2)) * np.array([0.01, 200])).astype(np.float32)
    x[0] = [1e6, -1e6]
    x[1] = [0.0009765625, -0.0029296875]
    y, z, back = np.zeros((60, 2), np.uint8), np.zeros((60, 2), np.uint8), np.zeros((60, 2), np.float32)
    module.launch("quantize", 2, 32, (x, y, back, z, 60))
    np.testing.assert_array_equal(eight_bits(y, 3, 7), nearest_eight_bits(x, 3, 7, 0x7E))
    np.testing.assert_array_equal(eight_bits(z, 2, 15), nearest_eight_bits(x, 2, 15, 0x7B))
    np.testing.assert_array_equal(back, eight_bits(y, 3, 7))


@check
def chain(module: PtxModule) -> None:
    x = random().integers(0, 9, (20, 32)).astype(np.float32)
    flags, y = np.zeros(20, np.uint32), np.zeros(20, np.float32)
    module.launch("chain", 20, 32, (flags, x, y, 640))
    np.testing.assert_array_equal(y, x.sum(1).cumsum())


def integer_result(v: int, d: int) -> int:
    """Return the result of the kernel ``integers`` for one element ``v``."""
    low, high = v & 0xFFFFFFFF, v >> 32

    def signed(value: int, width: int) -> int:
        return value - (1 << width) if value >> width - 1 else value

    result = v * 0x9E3779B97F4A7C15 >> 64
    result ^= int(f"{low:032b}"[::-1], 2) << 7
    both = low | high << 32
    permuted = sum((both >> 8 * (0x2503 >> 4 * i & 7) & 255) << 8 * i for i in range(4))
    first = (low & -low).bit_length()
    dot = 5 + sum(signed(low >> 8 * i & 255, 8) * signed(high >> 8 * i & 255, 8) for i in range(4))
    counts = permuted + (32 - high.bit_length()) + first + v.bit_count()
    result += (counts + dot) & 0xFFFFFFFF
    funnel = (both << 11 >> 32) & 0xFFFFFFFF
    wide = d & (1 << 64) - 1
    quotient = abs(signed(v, 64)) // abs(d) * (1 if (signed(v, 64) < 0) == (d < 0) else -1)
    result = (result & (1 << 64) - 1) ^ ((funnel + v % wide + quotient) & (1 << 64) - 1)
    add4 = sum(((low >> 8 * i) + (high >> 8 * i) & 255) << 8 * i for i in range(4))
    differ4 = sum(abs((low >> 8 * i & 255) - (high >> 8 * i & 255)) << 8 * i for i in range(4))
    max2 = sum(
        (max(signed(low >> 16 * i & 0xFFFF, 16), signed(high >> 16 * i & 0xFFFF, 16)) & 0xFFFF) << 16 * i
        for i in (0, 1)
    )
    return (result + (add4 ^ differ4 ^ max2)) & (1 << 64) - 1


@check
def integers(module: PtxModule) -> None:
    x = random().integers(0, 2**64, 70, np.uint64)
    d = random().integers(1, 2**31, 70).astype(np.int32) * np.where(np.arange(70) % 3, 1, -1).astype(np.int32)
    y = np.zeros(70, np.uint64)
    module.launch("integers", 3, 32, (x, d, y, 70))
    assert [int(value) for value in y] == [integer_result(int(v), int(e)) for v, e in zip(x, d, strict=True)]


@check
def special(module: PtxModule) -> None:
    from math import erf

    x = random().standard_normal(60) * 5
    y, z = np.zeros(60), np.zeros(60, np.float32)
    module.launch("special", 2, 32, (x, y, z, 60))
    np.testing.assert_allclose(y, np.sin(x) + np.exp(x * 0.1) * np.log(1 + abs(x)) + abs(x) ** 0.7, rtol=1e-12)
    f = x.astype(np.float32)
    expected = np.vectorize(erf)(f) + np.tanh(f) + np.sqrt(abs(f)) + 1 / (1 + (x * x).astype(np.float32))
    np.testing.assert_allclose(z, expected, rtol=2e-6, atol=2e-6)


@check
def groups(module: PtxModule) -> None:
    x, y = random().integers(0, 99, 512).astype(np.float32), np.zeros(64, np.float32)
    module.launch("groups", 2, 256, (x, y, 512))
    np.testing.assert_array_equal(y, x.reshape(64, 8).sum(1))


# ---- CUB ----


@check
def cub_sum(module: PtxModule) -> None:
    x, y = random().integers(-9, 10, (2, 300)).astype(np.float32), np.zeros(2, np.float32)
    module.launch("cub_sum", 2, 128, (x, y, 300))
    np.testing.assert_array_equal(y, x.sum(1))


@check
def cub_scan(module: PtxModule) -> None:
    x, y = random().integers(-9, 10, (2, 512)).astype(np.int32), np.zeros((2, 512), np.int32)
    module.launch("cub_scan", 2, 128, (x, y))
    np.testing.assert_array_equal(y, x.cumsum(1))


@check
def cub_sort(module: PtxModule) -> None:
    x, y = random().integers(0, 2**32, (2, 256), np.uint32), np.zeros((2, 256), np.uint32)
    module.launch("cub_sort", 2, 64, (x, y))
    np.testing.assert_array_equal(y, np.sort(x, axis=1))


# ---- Triton: its last two parameters are addresses of scratch memory ----


@check
def add(module: PtxModule) -> None:
    x, y = (random().standard_normal(1000).astype(np.float32) for _ in range(2))
    out = np.zeros(1000, np.float32)
    module.launch("add", 4, 128, (x, y, out, 1000, 0, 0))
    np.testing.assert_array_equal(out, x + y)


@check
def softmax(module: PtxModule) -> None:
    # Each of the 128 threads handles up to four columns: with these sizes, the last column is a thread's third, first,
    # second and fourth.
    for columns in (300, 100, 200, 450):
        x, out = random().standard_normal((3, columns)).astype(np.float32), np.zeros((3, columns), np.float32)
        module.launch("softmax", 3, 128, (x, out, columns, 0, 0), shared=16)
        e = np.exp(x - x.max(1, keepdims=True))
        np.testing.assert_allclose(out, e / e.sum(1, keepdims=True), rtol=1e-5, atol=1e-7)


@check
def layer_norm(module: PtxModule) -> None:
    x = random().standard_normal((2, 700)).astype(np.float16)
    w, b = (random().standard_normal(700).astype(np.float32) for _ in range(2))
    out = np.zeros_like(x)
    module.launch("layer_norm", 2, 128, (x, w, b, out, np.float32(1e-5), 700, 0, 0), shared=16)
    wide = x.astype(np.float64)
    expected = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5) * w + b
    np.testing.assert_allclose(out, expected, rtol=2e-3, atol=2e-3)


def matrices(name: str, kind: str, shared: int, tolerance: float) -> None:
    """Register the check of a GEMM kernel with operands of type ``kind``."""

    def product(module: PtxModule, m: int, n: int, k: int) -> None:
        a, b = (random().standard_normal(shape).astype(np.float32) for shape in ((m, k), (k, n)))
        if kind == "bf16":
            a, b = bfloat16(a), bfloat16(b)
        elif kind == "fp16":
            a, b = a.astype(np.float16), b.astype(np.float16)
        c = np.zeros((m, n), np.float32)
        grid = (-(-m // 64), -(-n // 64))
        module.launch("matmul", grid, 128, (a, b, c, m, n, k, 0, 0), shared=shared)
        wide = [(from_bfloat16(each) if kind == "bf16" else each).astype(np.float64) for each in (a, b)]
        np.testing.assert_allclose(c, wide[0] @ wide[1], rtol=tolerance, atol=tolerance)

    def function(module: PtxModule) -> None:
        product(module, 70, 90, 50)
        for index in range(32):  # each of a thread's bounds checks decides the result for one of these sizes
            product(module, 2 * index + 1, 2 * (index * 7 % 32) + 1, 2 * (index * 11 % 32) + 1 + 32 * (index % 2))

    CHECKS[name] = function


matrices("matmul_fp16", "fp16", 16384, 1e-4)
matrices("matmul_bf16", "bf16", 16384, 1e-4)
matrices("matmul_fp32", "fp32", 32768, 2e-2)


@check
def attention(module: PtxModule) -> None:
    q, k, v = (random().standard_normal((2, 70, 64)).astype(np.float16) for _ in range(3))
    out = np.zeros_like(q)
    scale = 1 / 8
    base2 = np.float32(scale * np.log2(np.e))
    module.launch("attention", (2, 2), 128, (q, k, v, out, base2, 70, 0, 0), shared=12288)
    scores = q.astype(np.float64) @ k.astype(np.float64).transpose(0, 2, 1) * scale
    p = np.exp(scores - scores.max(-1, keepdims=True))
    np.testing.assert_allclose(out, p / p.sum(-1, keepdims=True) @ v.astype(np.float64), rtol=4e-3, atol=4e-3)
