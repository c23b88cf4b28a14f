"""The mma intrinsics of a warp, and the rounding of their operands."""

from __future__ import annotations

import re

import numpy as np
import pytest

from contributed import Array, noise
from kernel_launch import kernel, run
from ort_cuda_plugin.compiler.compile import compile_kernel
from ort_cuda_plugin.compiler.targets import Target
from ort_cuda_plugin.estimate import sass


def as_tf32(x: Array) -> Array:
    """Return float32 numbers rounded to TF32's 10 mantissa bits, with ties away from zero."""
    bits = x.view(np.uint32)
    up = np.where(np.isfinite(x), bits + np.uint32(0x1000), bits)
    result: Array = (up & np.uint32(0xFFFFE000)).astype(np.uint32).view(np.float32)
    return result


def test_float32_is_rounded_to_tf32_and_small_matrices_are_multiplied() -> None:
    """Operands are rounded, their products are exact, and lanes hold the matrix elements that a GPU's mma expects."""
    spec = kernel(
        "small",
        ("*f32", "*f32", "*f32", "*u32"),
        """
def kernel(a, b, c, words):
    lane = int32(cuda.threadIdx.x)
    g = int32(lane >> 2)
    t = int32(lane & 3)
    sums = registers_f32(4)
    a0 = round_tf32(a[g * 8 + t])
    a1 = round_tf32(a[(g + 8) * 8 + t])
    a2 = round_tf32(a[g * 8 + t + 4])
    a3 = round_tf32(a[(g + 8) * 8 + t + 4])
    multiply_add_matrix_tf32(sums, 0, a0, a1, a2, a3, round_tf32(b[t * 8 + g]), round_tf32(b[(t + 4) * 8 + g]))
    for i in range(2):
        c[g * 8 + 2 * t + i] = sums[i]
        c[(g + 8) * 8 + 2 * t + i] = sums[2 + i]
    words[lane] = a0
""",
    )
    a, b = noise(16, 8, seed=1), noise(8, 8, seed=2)
    a[:8, 0] = [np.inf, -np.inf, np.nan, -0.0, 1 + 2**-11, -1 - 2**-11, 1 + 2**-11 - 2**-23, np.float32(1e-40)]
    a[:4, 1:] = 0
    empty = [np.zeros((16, 8), np.float32), np.zeros(32, np.uint32)]
    _, _, c, words = run(spec, (1, 1, 1), (32, 1, 1), a, b, *empty)
    np.testing.assert_array_equal(words.view(np.float32).reshape(8, 4), as_tf32(a)[:8, :4])
    assert words.view(np.float32)[16] == 1 + 2**-10
    assert words.view(np.float32)[24] == 1
    expected = as_tf32(a)[3:].astype(np.float64) @ as_tf32(b).astype(np.float64)
    np.testing.assert_allclose(c[3:], expected, 1e-6, 1e-6)


@pytest.mark.parametrize("kind", ["i8", "u8"])
def test_small_matrices_of_bytes_are_multiplied_exactly(kind: str) -> None:
    """Lanes hold the matrix elements that a GPU's mma expects; products are added to the sums' initial values."""
    source = f"""
def kernel(a, b, c):
    lane = int32(cuda.threadIdx.x)
    g = int32(lane >> 2)
    t = int32(lane & 3)
    sums = registers_i32(4)
    for i in range(2):
        sums[i] = c[g * 8 + 2 * t + i]
        sums[2 + i] = c[(g + 8) * 8 + 2 * t + i]
    at = g * 8 + t
    multiply_add_matrix_{kind}(sums, 0, a[at], a[at + 64], a[at + 4], a[at + 68], b[at], b[at + 4])
    for i in range(2):
        c[g * 8 + 2 * t + i] = sums[i]
        c[(g + 8) * 8 + 2 * t + i] = sums[2 + i]
"""
    spec = kernel(f"bytes_{kind}", ("*u32", "*u32", "*i32"), source)
    random = np.random.default_rng(1)
    a = random.integers(0, 256, (16, 32), np.uint8).view(np.int8 if kind == "i8" else np.uint8)
    b = random.integers(-128, 128, (8, 32), np.int8)  # stored by columns
    before = random.integers(-(2**20), 2**20, (16, 8), np.int32)
    _, _, c = run(spec, (1, 1, 1), (32, 1, 1), a.view(np.uint32), b.view(np.uint32), before.copy())
    np.testing.assert_array_equal(c, before + a.astype(np.int32) @ b.T.astype(np.int32))
    for target in (Target.cuda(8, 0), Target.cuda(9, 0), Target.cuda(12, 0)):
        image = compile_kernel(spec, target)
        assert f"mma.sync.aligned.m16n8k32.row.col.s32.{'s8' if kind == 'i8' else 'u8'}.s8.s32".encode() in image.ptx
        text = sass.disassembled(image)
        assert not text or "IMMA" in sass.mix_of(text), text


@pytest.mark.parametrize(("capability", "instruction"), [((8, 0), "LOP3"), ((9, 0), "F2FP"), ((12, 0), "F2FP")])
def test_rounding_is_as_short_as_the_gpu_allows(capability: tuple[int, int], instruction: str) -> None:
    source = "def kernel(x, y):\n    i = cuda.grid(1)\n    y[i] = round_tf32(x[i])\n"
    image = compile_kernel(kernel("rounds", ("*f32", "*u32"), source), Target.cuda(*capability))
    assert (b"cvt.rna.tf32.f32" in image.ptx) == (instruction == "LOP3")
    text = sass.disassembled(image)
    assert not text or (instruction in sass.mix_of(text) and ("LOP3" in sass.mix_of(text)) == (instruction == "LOP3"))


@pytest.mark.parametrize("function", ["copy_async_where", "copy_async_cached_where"])
def test_a_copy_without_its_condition_writes_zeros(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads nothing, whatever its index is; on a GPU the instruction itself takes the condition."""
    monkeypatch.setenv("ORT_CUDA_PLUGIN_EMULATE_CHECK", "1")
    source = f"""
def kernel(x, y, count):
    tile = array_pointer(cuda.shared.array(128, float32, 16))
    lane = int32(cuda.threadIdx.x)
    index = int64(4 * (3 * lane - 7))
    {function}(shared_address(tile) + int64(lane * 16), x, index, (index >= 0) & (index < count))
    copy_async_commit()
    copy_async_wait(0)
    cuda.syncthreads()
    for i in range(4):
        y[lane * 4 + i] = tile[lane * 4 + i]
"""
    spec = kernel(function, ("*f32", "*f32", "i64"), source)
    x = noise(64, seed=1)
    _, y = run(spec, (1, 1, 1), (32, 1, 1), x, np.full((32, 4), 7, np.float32), np.int64(64))
    places = 3 * np.arange(32) - 7
    inside = (places >= 0) & (places < 16)
    np.testing.assert_array_equal(y, np.where(inside[:, None], x.reshape(16, 4)[places % 16], 0))
    if sass.disassembler() is not None:
        text = sass.disassembled(compile_kernel(spec, Target.cuda(9, 0)))
        assert re.search(r"LDGSTS[^;]*\], !?P\d", text)
