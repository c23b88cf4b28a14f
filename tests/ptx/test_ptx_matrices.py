"""PTX on the emulated device: mma in all shapes and types, ldmatrix and stmatrix."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from foreign_kernels import bfloat16, eight_bits, from_bfloat16
from ort_cuda_plugin import emulator

HEAD = ".version 8.6\n.target sm_90\n.address_size 64\n"
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "s8": 8, "u8": 8, "e4m3": 8, "e5m2": 8, "s4": 4, "u4": 4, "b1": 1, "f64": 64}


def codes(rng: np.random.Generator, kind: str, shape: tuple[int, int]) -> npt.NDArray[np.uint64]:
    """Return the bit patterns of random elements of a type."""
    numbers = rng.standard_normal(shape)
    if kind == "f64":
        return numbers.view(np.uint64)
    if kind == "tf32":
        return numbers.astype(np.float32).view(np.uint32).astype(np.uint64)
    if kind in ("f16", "bf16"):
        return (bfloat16(numbers) if kind == "bf16" else numbers.astype(np.float16).view(np.uint16)).astype(np.uint64)
    below = {"e4m3": 0x40, "e5m2": 0x40}.get(kind, 1 << BITS[kind])
    return rng.integers(0, below, shape).astype(np.uint64)


def numbers(kind: str, bits: npt.NDArray[np.uint64]) -> npt.NDArray[Any]:
    """Return the values of bit patterns of a type."""
    if kind == "f64":
        return bits.view(np.float64)
    if kind == "tf32":
        return (bits.astype(np.uint32) & np.uint32(~8191 & 0xFFFFFFFF)).view(np.float32).astype(np.float64)
    if kind == "bf16":
        return from_bfloat16(bits.astype(np.uint16)).astype(np.float64)
    if kind == "f16":
        return bits.astype(np.uint16).view(np.float16).astype(np.float64)
    if kind in ("e4m3", "e5m2"):
        return eight_bits(bits.astype(np.uint8), *((3, 7) if kind == "e4m3" else (2, 15)))
    half = 1 << BITS[kind] - 1
    signed = bits.astype(np.int64)
    return np.where(signed >= half, signed - 2 * half, signed) if kind[0] == "s" else signed


def registers(bits: npt.NDArray[np.uint64], kind: str, halves: int) -> npt.NDArray[np.uint32]:
    """Return the mma fragments of the rows of a, or of the columns of b: 32-bit words of [lane, register].

    A register holds ``parts`` elements along k; a pair of registers holds a float64. Register i of lane 4 g + t holds
    row g + 8 (i % halves), from k = parts (4 (i // halves) + t) on.
    """
    width = BITS[kind]
    parts = max(1, 32 // width)
    rows, depth = bits.shape
    blocks = depth // (4 * parts)
    cut = bits.reshape(halves, rows // halves, blocks, 4, parts)
    moved = cut.transpose(1, 3, 2, 0, 4).reshape(32, blocks * halves, parts)
    if width == 64:
        return moved.reshape(32, -1).copy().view(np.uint32)
    shifts = (np.arange(parts) * width).astype(np.uint64)
    return np.ascontiguousarray((moved << shifts).sum(-1).astype(np.uint32))


FORMS = [
    *("m16n8k16.f32.f16.f16.f32", "m16n8k8.f32.f16.f16.f32", "m16n8k16.f16.f16.f16.f16", "m16n8k16.f32.bf16.bf16.f32"),
    *("m16n8k8.f32.bf16.bf16.f32", "m16n8k8.f32.tf32.tf32.f32", "m16n8k4.f32.tf32.tf32.f32", "m16n8k32.s32.s8.s8.s32"),
    *("m16n8k16.s32.u8.s8.s32", "m8n8k16.s32.s8.u8.s32", "m16n8k64.s32.s4.u4.s32", "m16n8k32.f32.e4m3.e5m2.f32"),
    *("m16n8k32.f16.e5m2.e5m2.f16", "m8n8k4.f64.f64.f64.f64", "m16n8k8.f64.f64.f64.f64"),
    *("m16n8k256.s32.b1.b1.s32.and.popc", "m8n8k128.s32.b1.b1.s32.xor.popc"),
]


@pytest.mark.parametrize("form", FORMS)
def test_products_are_numpys(form: str) -> None:
    shape, d, a, b, _, *operation = form.split(".")
    m, k = int(shape[1:].split("n")[0]), int(shape.split("k")[1])
    rng = np.random.default_rng(7)
    left, right = codes(rng, a, (m, k)), codes(rng, b, (8, k))
    x, y = registers(left, a, m // 8), registers(right, b, 1)
    start = rng.integers(-9, 10, (m, 8)).astype(np.float64)
    kinds = {"f32": np.float32, "f16": np.float16, "s32": np.int32, "f64": np.float64}
    c = start.reshape(m // 8, 8, 4, 2).transpose(1, 2, 0, 3).reshape(32, -1).astype(kinds[d])
    ty, size = ("b64", 8) if d == "f64" else ("b32", 4)
    counts = [each.view(np.uint32).shape[1] * 4 // size for each in (x, y, c)]
    groups = [", ".join(f"%{name}{i}" for i in range(count)) for name, count in zip("abc", counts, strict=True)]
    loads = "".join(
        f"mul.wide.u32 %s, %t, {size * count}; ld.param.u64 %p, [{name}]; add.u64 %p, %p, %s;"
        + "".join(f"ld.global.{ty} %{name}{i}, [%p+{size * i}];" for i in range(count))
        for name, count in zip("abc", counts, strict=True)
    )
    stores = "".join(f"st.global.{ty} [%p+{size * i}], %c{i};" for i in range(counts[2]))
    module = emulator.load(
        f"{HEAD}.visible .entry k(.param .u64 a, .param .u64 b, .param .u64 c) {{\n"
        f".reg .{ty} %a<16>, %b<16>, %c<16>; .reg .b64 %p, %s; .reg .b32 %t; mov.u32 %t, %tid.x;\n"
        f"{loads}\nmma.sync.aligned.{shape}.row.col.{d}.{a}.{b}.{d}{''.join(f'.{each}' for each in operation)} "
        f"{{{groups[2]}}}, {{{groups[0]}}}, {{{groups[1]}}}, {{{groups[2]}}};\n{stores}\nret;\n}}"
    )
    module.launch("k", 1, 32, (x, y, c))
    if "xor" in operation:
        expected = start + (left[:, None].astype(int) ^ right[None].astype(int)).sum(-1)
    else:
        expected = start + numbers(a, left) @ numbers(b, right).T
    got = c.reshape(8, 4, m // 8, 2).transpose(2, 0, 1, 3).reshape(m, 8)
    tolerance = {"s32": 0, "f64": 1e-13, "f32": 1e-5, "f16": 2e-3}[d]
    size_of_sums = np.abs(numbers(a, left)) @ np.abs(numbers(b, right)).T + np.abs(start)
    assert (np.abs(got - expected) <= tolerance * size_of_sums).all()


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", ["", ".trans"])
def test_matrices_are_loaded_and_stored_by_all_lanes(count: int, transposed: str) -> None:
    group = ", ".join(f"%r{i}" for i in range(count))
    tile = np.arange(32 * 8, dtype=np.uint16)
    y = np.zeros((32, count), np.uint32)
    copied = np.zeros(8 * count * 8, np.uint16)
    words = "".join(f"st.global.u32 [%y+{4 * i}], %r{i};" for i in range(count))
    module = emulator.load(
        f"{HEAD}.shared .align 16 .b8 tile[1024];\n"
        ".visible .entry k(.param .u64 x, .param .u64 y, .param .u64 z) {\n"
        ".reg .b64 %x, %y, %z, %a; .reg .b32 %t, %s, %q<4>, %r<4>; .reg .pred %p; mov.u32 %t, %tid.x;"
        "ld.param.u64 %x, [x]; ld.param.u64 %y, [y]; ld.param.u64 %z, [z];\n"
        "mul.wide.u32 %a, %t, 16; add.u64 %x, %x, %a; add.u64 %z, %z, %a; cvt.u32.u64 %s, %a; mov.u32 %q0, tile;"
        "add.u32 %s, %s, %q0; ld.global.v4.u32 {%q0, %q1, %q2, %q3}, [%x];"
        "st.shared.v4.u32 [%s], {%q0, %q1, %q2, %q3}; bar.warp.sync 0xffffffff;\n"
        f"ldmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16 {{{group}}}, [%s];\n"
        f"mul.wide.u32 %a, %t, {4 * count}; add.u64 %y, %y, %a; {words}\n"
        f"stmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16 [%s+512], {{{group}}}; bar.warp.sync 0xffffffff;\n"
        f"setp.ge.u32 %p, %t, {8 * count}; @%p ret; ld.shared.v4.u32 {{%q0, %q1, %q2, %q3}}, [%s+512];"
        "st.global.v4.u32 [%z], {%q0, %q1, %q2, %q3};\nret;\n}"
    )
    module.launch("k", 1, 32, (tile, y, copied))
    matrices = tile.reshape(4, 8, 8)[:count]
    seen = matrices.transpose(0, 2, 1) if transposed else matrices
    for lane in range(32):
        pairs = seen[:, lane // 4, lane % 4 * 2 : lane % 4 * 2 + 2].astype(np.uint32)
        np.testing.assert_array_equal(y[lane], pairs[:, 0] | pairs[:, 1] << 16)
    np.testing.assert_array_equal(copied.reshape(count, 8, 8), matrices)


@pytest.mark.parametrize(
    ("instruction", "message"),
    [
        ("m8n8k4.row.col.f32.f16.f16.f32 {%f}, {%r}, {%r}, {%f}", "the shape .m8n8k4 is not supported for .f16"),
        (
            "m16n8k16.row.col.f32.f16.bf16.f32 {%f}, {%r}, {%r}, {%f}",
            "the types .f32, .f16, .bf16 and .f32 of d, a, b and c are not supported",
        ),
        (
            "m16n8k16.row.col.f32.f16.f16.f32 {%f}, {%r}, {%r}, {%f}",
            r"registers of d, a, b and c: got \[1, 1, 1, 1\], expected \[4, 4, 2, 4\]",
        ),
    ],
)
def test_forms_that_do_not_exist_are_named(instruction: str, message: str) -> None:
    module = emulator.load(
        f"{HEAD}.visible .entry k() {{ .reg .b32 %r; .reg .f32 %f; mma.sync.aligned.{instruction}; ret; }}"
    )
    with pytest.raises(emulator.EmulatorError, match=message):
        module.launch("k", 1, 32, ())
