"""Compilation of kernels: to the emulated device, run there and compared with NumPy, and to GPU architectures."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.cuda.cudadrv import nvvm

from kernel_launch import kernel, run
from ort_cuda_plugin.compiler.compile import KernelCompileError, compile_kernel, emulated_ir, kernel_ir
from ort_cuda_plugin.compiler.elf import Elf
from ort_cuda_plugin.compiler.host import intrinsics as host_intrinsics
from ort_cuda_plugin.compiler.host import math as host_math
from ort_cuda_plugin.compiler.host.ir import opaque_pointers
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.compiler.targets import Target

triple = kernel(
    "triple",
    ("*f32", "*f32", "i32"),
    """
def kernel(x, y, n):
    i = cuda.grid(1)
    if i < n:
        y[i] = x[i] * float32(3)
""",
)


@settings(max_examples=40)
@given(n=st.integers(0, 300), block=st.sampled_from([1, 32, 33, 64, 256]), blocks=st.integers(1, 6))
def test_a_bounds_check_holds_in_full_partial_and_empty_blocks(n: int, block: int, blocks: int) -> None:
    x = np.arange(2048, dtype=np.float32)
    _, y = run(triple, (blocks, 1, 1), (block, 1, 1), x, np.full(2048, -1, np.float32), n)
    covered = min(n, block * blocks)
    np.testing.assert_array_equal(y[:covered], 3 * x[:covered])
    np.testing.assert_array_equal(y[covered:], -1)


nested = kernel(
    "nested",
    ("*i32", "*i32", "i32", "i32"),
    """
def kernel(x, y, rows, columns):
    row = int32(cuda.blockIdx.y * cuda.blockDim.y + cuda.threadIdx.y)
    if row < rows:
        base = row * columns
        column = int32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
        if column >= columns:
            return
        y[base + column] = x[base + column] + int32(1)
""",
)


@settings(max_examples=40)
@given(rows=st.integers(0, 20), columns=st.integers(0, 40), block=st.sampled_from([(8, 4, 1), (32, 1, 1), (5, 3, 1)]))
def test_nested_bounds_checks_hold(rows: int, columns: int, block: tuple[int, int, int]) -> None:
    x = np.arange(1000, dtype=np.int32)
    grid = (-(-40 // block[0]), -(-20 // block[1]), 1)
    _, y = run(nested, grid, block, x, np.full(1000, -1, np.int32), rows, columns)
    np.testing.assert_array_equal(y[: rows * columns], x[: rows * columns] + 1)
    np.testing.assert_array_equal(y[rows * columns :], -1)


indices = kernel(
    "indices",
    ("*i32",),
    """
def kernel(out):
    t = cuda.threadIdx
    b = cuda.blockIdx
    block = (b.z * cuda.gridDim.y + b.y) * cuda.gridDim.x + b.x
    thread = (t.z * cuda.blockDim.y + t.y) * cuda.blockDim.x + t.x
    at = (block * cuda.blockDim.x * cuda.blockDim.y * cuda.blockDim.z + thread) * 4
    out[at] = t.x + 100 * t.y + 10000 * t.z
    out[at + 1] = b.x + 100 * b.y + 10000 * b.z
    out[at + 2] = cuda.laneid
    out[at + 3] = cuda.warpsize
""",
)
indices_of_fibers = kernel("indices_of_fibers", ("*i32",), indices.source + "    cuda.syncthreads()\n")


@pytest.mark.parametrize("spec", [indices, indices_of_fibers])
def test_special_registers_in_three_dimensions(spec: KernelSpec) -> None:
    grid, block = (3, 2, 2), (5, 4, 3)
    threads = 60
    (out,) = run(spec, grid, block, np.zeros(12 * threads * 4, np.int32))
    out = out.reshape(12, threads, 4)
    z, y, x = np.unravel_index(np.arange(threads), block[::-1])
    np.testing.assert_array_equal(out[:, :, 0], np.broadcast_to(x + 100 * y + 10000 * z, (12, threads)))
    z, y, x = np.unravel_index(np.arange(12), grid[::-1])
    np.testing.assert_array_equal(out[:, :, 1], np.broadcast_to((x + 100 * y + 10000 * z)[:, None], (12, threads)))
    np.testing.assert_array_equal(out[:, :, 2], np.broadcast_to(np.arange(threads) % 32, (12, threads)))
    assert (out[:, :, 3] == 32).all()


def test_static_and_dynamic_shared_memory_do_not_overlap() -> None:
    spec = kernel(
        "shared",
        ("*f32", "*f64"),
        """
def kernel(x, y):
    a = cuda.shared.array(33, float32)
    b = cuda.shared.array((4, 8), float64)
    c = cuda.shared.array(0, float32)
    t = cuda.threadIdx.x
    a[t] = x[t]
    b[t // 8, t % 8] = float64(x[t]) * 2
    c[t] = x[t] * float32(3)
    if t == 0:
        a[32] = float32(len(c))
    cuda.syncthreads()
    y[t] = a[31 - t] + 100 * b[(31 - t) // 8, (31 - t) % 8] + 10000 * c[31 - t]
    y[32] = a[32]
""",
    )
    x = np.arange(32, dtype=np.float32)
    _, y = run(spec, (1, 1, 1), (32, 1, 1), x, np.zeros(33), shared=128)
    reverse = x[::-1].astype(np.float64)
    np.testing.assert_array_equal(y[:32], reverse + 200 * reverse + 30000 * reverse)
    assert y[32] == 32


row_sum = kernel(
    "row_sum",
    ("*f32", "*f32", "i32"),
    """
def kernel(x, y, n):
    partial = cuda.shared.array(32, float32)
    t = cuda.threadIdx.x
    total = float32(0)
    for i in range(t, n, cuda.blockDim.x):
        total += x[cuda.blockIdx.x * n + i]
    for delta in (16, 8, 4, 2, 1):
        total += shfl_down_f32(total, delta)
    if t % 32 == 0:
        partial[t // 32] = total
    cuda.syncthreads()
    if t == 0:
        total = float32(0)
        for i in range(cuda.blockDim.x // 32):
            total += partial[i]
        y[cuda.blockIdx.x] = total
""",
)


@settings(max_examples=15)
@given(n=st.integers(1, 500), warps=st.integers(1, 8), rows=st.integers(1, 5), seed=st.integers(0, 99))
def test_a_reduction_with_shuffles_and_barriers(n: int, warps: int, rows: int, seed: int) -> None:
    x = np.random.default_rng(seed).integers(-9, 9, (rows, n)).astype(np.float32)
    _, y = run(row_sum, (rows, 1, 1), (32 * warps, 1, 1), x, np.zeros(rows, np.float32), n)
    np.testing.assert_array_equal(y, x.sum(axis=1))


def test_a_local_array_belongs_to_one_thread() -> None:
    spec = kernel(
        "local",
        ("*i32", "i32"),
        """
def kernel(y, k):
    local = cuda.local.array((4, 4), int32)
    t = int32(cuda.threadIdx.x)
    for i in range(4):
        for j in range(4):
            local[i, j] = t * (i * 4 + j)
    y[t] = local[k // 4, k % 4]
""",
    )
    (y,) = run(spec, (1, 1, 1), (40, 1, 1), np.zeros(40, np.int32), 7)
    np.testing.assert_array_equal(y, 7 * np.arange(40))


def test_a_product_and_a_sum_are_contracted_as_on_a_gpu() -> None:
    spec = kernel(
        "contract",
        ("*f32", "*f32"),
        """
def kernel(x, y):
    i = cuda.threadIdx.x
    y[i] = x[i] * x[i] - y[i]
""",
    )
    x = np.float32(1) + np.arange(1, 65, dtype=np.float32) * np.float32(2**-12)
    rounded = x * x
    _, y = run(spec, (1, 1, 1), (64, 1, 1), x, rounded)
    np.testing.assert_array_equal(y, (x.astype(np.float64) ** 2 - rounded).astype(np.float32))
    assert y.any()


def test_indices_beyond_32_bits_are_not_cut() -> None:
    spec = kernel(
        "far",
        ("*f32", "i64"),
        """
def kernel(x, shift):
    i = cuda.grid(1) + shift
    x[i - shift] = float32(i // 2**20)
""",
    )
    (x,) = run(spec, (1, 1, 1), (32, 1, 1), np.zeros(32, np.float32), 2**40)
    np.testing.assert_array_equal(x, 2**20)


# ---- object files ----


def test_the_meta_data_describes_the_kernel() -> None:
    spec = kernel(
        "meta",
        ("*f16", "i32", "i64", "f32", "f64", "*b1"),
        "def kernel(a, b, c, d, e, f):\n    s = cuda.shared.array(5, float32)\n    s[0] = d\n    cuda.syncthreads()\n",
    )
    image = compile_kernel(spec, Target.emulated())
    elf = Elf(image.data)
    offset = elf.symbol_offset(elf.symbol(f"{spec.symbol}.meta"))
    version, mode, shared, _stack, checked, count = struct.unpack_from("<6I", image.data, offset)
    assert (version, mode, shared, checked, count) == (1, 1, 32, 0, 6)
    assert list(image.data[offset + 24 : offset + 24 + 7]) == [0x80, 4, 8, 4, 8, 0x80, 0]
    assert image.metadata["fibers"] == 1


@pytest.mark.parametrize("elements", [40, 2000])
def test_the_meta_data_holds_the_stack_that_a_thread_needs(elements: int) -> None:
    spec = kernel(
        "deep",
        ("*f32", "i32"),
        f"""
def kernel(x, k):
    local = cuda.local.array({elements}, float32)
    for i in range({elements}):
        local[i] = x[i]
    cuda.syncthreads()
    x[0] = local[k]
""",
    )
    image = compile_kernel(spec, Target.emulated())
    offset = Elf(image.data).symbol_offset(Elf(image.data).symbol(f"{spec.symbol}.meta"))
    (stack,) = struct.unpack_from("<I", image.data, offset + 12)
    assert 4 * elements < stack < 4 * elements + 8192


def test_objects_need_only_absolute_relocations() -> None:
    image = compile_kernel(row_sum, Target.emulated())
    elf = Elf(image.data)
    kinds = {
        struct.unpack_from("<Q", elf.contents(section), at + 8)[0] & 0xFFFFFFFF
        for section in elf.sections
        if section.type == 4
        for at in range(0, section.size, 24)
    }
    assert kinds == {1}  # R_X86_64_64


def test_the_emulator_knows_every_function_that_kernels_can_need() -> None:
    from pathlib import Path

    names = set(host_math.libm_declarations) | set(host_intrinsics.declarations)
    text = (Path(__file__).parents[2] / "csrc_shim" / "emulator" / "calls" / "symbols.c").read_text()
    missing = {name for name in names if f'"{name}"' not in text and f"SAME({name})" not in text}
    assert not missing


def test_checks_stand_before_accesses_that_can_be_wrong() -> None:
    spec = kernel(
        "checked",
        ("*f32", "*i32", "i32"),
        """
def kernel(x, count, k):
    local = cuda.local.array(8, float32)
    for i in range(8):
        local[i] = x[i]
    x[9] = local[k]
    atomic_add_i32(count, 0, 1)
""",
    )
    text = emulated_ir(spec, kernel_ir(spec), Target.emulated(check=True))
    body = text[text.index("@ocp.body") : text.index("\n}")]
    assert body.count("call void @ocp_emu_check_store") == 1
    assert body.count("call void @ocp_emu_check_load") >= 1
    assert body.count("call void @ocp_emu_check_atomic") == 1
    for line in body.splitlines():
        assert "ocp_emu_check" not in line or "%_cudapy_lmem" not in line


# ---- GPU ----

architectures = [(8, 0), (9, 0), (10, 0), (12, 0)]


@pytest.mark.parametrize("compute_capability", architectures)
@pytest.mark.parametrize("spec", [triple, row_sum], ids=lambda spec: spec.name)
def test_cubins_are_made_without_a_gpu(spec: KernelSpec, compute_capability: tuple[int, int]) -> None:
    image = compile_kernel(spec, Target.cuda(*compute_capability))
    elf = Elf(image.data)
    assert elf.symbol(spec.symbol).size > 0
    assert f".entry {spec.symbol}(".encode() in image.ptx


def test_an_architecture_newer_than_the_toolkit_gets_ptx() -> None:
    image = compile_kernel(triple, Target.cuda(99, 0))
    assert image.data == image.ptx + b"\0"
    assert f".entry {triple.symbol}(".encode() in image.data


def test_launch_bounds_reach_the_ptx() -> None:
    spec = kernel("bounded", triple.signature, triple.source, launch_bounds=256)
    assert b".maxntid 256" in compile_kernel(spec, Target.cuda(9, 0)).ptx
    assert b".maxntid" not in compile_kernel(triple, Target.cuda(9, 0)).ptx


def test_fast_math_is_off() -> None:
    spec = kernel("exact", ("*f32",), "def kernel(x):\n    x[0] = math.exp(x[1]) / x[2]\n")
    assert b"div.rn.f32" in compile_kernel(spec, Target.cuda(9, 0)).ptx


# ---- errors ----


@pytest.mark.parametrize("target", [Target.emulated(), Target.cuda(9, 0)], ids=lambda target: target.arch)
@pytest.mark.parametrize(
    ("source", "line", "shown"),
    [
        ("def kernel(x):\n    y = x[0]\n    x[1] = no_such_function(y)\n", 3, "no_such_function(y)"),
        ("def kernel(x):\n    y = x[0]\n    x[1] = y.shape\n", 3, "y.shape"),
        ("def kernel(x):\n    y = = 3\n", 2, "y = = 3"),
    ],
)
def test_an_error_names_the_kernel_and_the_line(target: Target, source: str, line: int, shown: str) -> None:
    spec = kernel("wrong", ("*f32",), source)
    with pytest.raises(KernelCompileError) as caught:
        compile_kernel(spec, target)
    assert caught.value.line == line
    assert "kernel 'wrong'" in str(caught.value)
    assert f"line {line}" in str(caught.value)
    assert shown in str(caught.value)


def test_a_source_without_a_kernel_is_an_error() -> None:
    with pytest.raises(KernelCompileError, match="defines no function `kernel`"):
        compile_kernel(kernel("wrong", ("*f32",), "def other(x):\n    pass\n"), Target.emulated())


def test_an_error_of_nvvm_advises_an_installation_only_where_nvvm_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> bytes:
        raise RuntimeError("ERROR_COMPILATION (9)")

    with pytest.raises(KernelCompileError, match=r"sm_70: CUDA 13 does not compile for this architecture") as caught:
        compile_kernel(triple, Target.cuda(7, 0))
    assert "pip install" not in str(caught.value)
    monkeypatch.setattr(nvvm, "compile_ir", fail)
    with pytest.raises(
        KernelCompileError, match=r"does not compile the kernel: ERROR_COMPILATION \(9\)\. Report the model$"
    ):
        compile_kernel(triple, Target.cuda(9, 0))
    monkeypatch.setattr(nvvm, "NVVM", fail)
    with pytest.raises(KernelCompileError, match=r"NVVM cannot be loaded \(.*\); `pip install"):
        compile_kernel(triple, Target.cuda(9, 0))


def test_an_error_names_what_the_emulated_device_lacks() -> None:
    spec = kernel("lacking", ("*i32",), "def kernel(x):\n    x[0] = cuda.match_any_sync(-1, x[1])\n")
    with pytest.raises(KernelCompileError, match=r"emulated device does not support .*match\.any"):
        compile_kernel(spec, Target.emulated())


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "a b", "signature": ("*f32",), "source": "x"},
        {"name": "a", "signature": ("f16",), "source": "x"},
    ],
)
def test_a_contradictory_spec_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="kernel"):
        KernelSpec(**fields)  # type: ignore[arg-type]


def test_names_that_llvm_quotes_are_ordinary_names() -> None:
    spec = kernel(
        "quoted",
        ("*f32", "*f32", "i32"),
        """
def kernel(größe, y, n):
    é = cuda.grid(1)
    if é < n:
        ß = größe[é]
        cuda.syncwarp()
        y[é] = math.exp(ß) + shfl_xor_f32(ß, 1)
""",
    )
    x = np.linspace(-1, 1, 64).astype(np.float32)
    _, y = run(spec, (1, 1, 1), (64, 1, 1), x, np.zeros(64, np.float32), 64)
    np.testing.assert_allclose(y, np.exp(x) + x.reshape(32, 2)[:, ::-1].ravel(), rtol=1e-6)
    assert emulated_ir(spec, kernel_ir(spec), Target.emulated(check=True)).count("call void @ocp_emu_check_") == 2


@pytest.mark.parametrize(
    ("typed", "opaque"),
    [
        ("float* %x", "ptr %x"),
        ("float** %x", "ptr %x"),
        ("[4 x float] addrspace(3)* @s", "ptr @s"),
        ("{i8*, i8*, i64, float*, [1 x i64]}* %a", "ptr %a"),
        ("{{i8*, [2 x {i64*, i1}]}*, i64}** %a", "ptr %a"),
        ("load {i64, i1}, {i64, i1}* %b", "load {i64, i1}, ptr %b"),
        ("[2 x [3 x double]]* %c, i64 2", "ptr %c, i64 2"),
        ("<4 x float>* %v", "ptr %v"),
    ],
)
def test_typed_pointers_become_opaque(typed: str, opaque: str) -> None:
    assert opaque_pointers(typed) == opaque
