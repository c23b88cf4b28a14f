"""PTX on the emulated device: memory, control flow, barriers, warp operations, tensor cores, and errors."""

from __future__ import annotations

import numpy as np
import pytest

from emulator_harness import current
from ort_cuda_plugin import emulator

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"


def kernel(body: str, registers: str = "", before: str = "") -> emulator.PtxModule:
    """Return a module with a kernel ``k`` of two arrays: %x and %y hold their addresses, %t the thread's number."""
    return emulator.load(
        f"{HEAD}{before}\n.visible .entry k(.param .u64 x, .param .u64 y) {{\n"
        f".reg .b64 %x, %y, %a, %b; .reg .b32 %t, %r<16>; .reg .f32 %f<16>; .reg .pred %p<4>; {registers}\n"
        "ld.param.u64 %x, [x]; ld.param.u64 %y, [y]; mov.u32 %t, %tid.x;\n"
        f"{body}\nret;\n}}"
    )


def words(count: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.random.default_rng(seed).integers(0, 2**32, count, np.uint32)


def test_shared_memory_is_read_after_a_barrier() -> None:
    module = kernel(
        "mul.wide.u32 %a, %t, 4; add.u64 %x, %x, %a; ld.global.u32 %r1, [%x]; mov.u64 %b, tile; add.u64 %b, %b, %a;"
        "st.shared.u32 [%b], %r1; bar.sync 0; mov.u32 %r2, tile; sub.u32 %r3, 63, %t; shl.b32 %r3, %r3, 2;"
        "add.u32 %r2, %r2, %r3; ld.shared.u32 %r4, [%r2]; add.u64 %y, %y, %a; st.global.u32 [%y], %r4;",
        before=".shared .align 4 .b8 tile[256];",
    )
    x, y = words(64), np.zeros(64, np.uint32)
    module.launch("k", 1, 64, (x, y))
    np.testing.assert_array_equal(y, x[::-1])


def test_generic_addresses_reach_shared_local_and_global_memory() -> None:
    module = kernel(
        "cvta.shared.u64 %a, tile; cvta.local.u64 %b, own; st.u32 [%a+4], 7; st.local.u32 [own+8], 9;"
        "ld.shared.u32 %r1, [tile+4]; ld.u32 %r2, [%b+8]; cvta.to.global.u64 %x, %x; ld.u32 %r3, [%x];"
        "isspacep.shared %p1, %a; selp.u32 %r4, 1, 0, %p1; isspacep.shared %p1, %x; selp.u32 %r5, 1, 0, %p1;"
        "st.global.v4.u32 [%y], {%r1, %r2, %r3, %r4}; st.global.u32 [%y+16], %r5;",
        before=".shared .align 4 .b8 tile[16];",
        registers=".local .align 4 .b8 own[16];",
    )
    x, y = words(1), np.zeros(5, np.uint32)
    module.launch("k", 1, 1, (x, y))
    np.testing.assert_array_equal(y, [7, 9, x[0], 1, 0])


def test_dynamic_shared_memory_and_constants() -> None:
    module = kernel(
        "mul.wide.u32 %a, %t, 4; mov.u64 %b, table; add.u64 %b, %b, %a; ld.const.u32 %r1, [%b];"
        "mov.u64 %b, dynamic; add.u64 %b, %b, %a; st.shared.u32 [%b], %r1; ld.shared.u32 %r2, [%b];"
        "add.u64 %y, %y, %a; st.global.u32 [%y], %r2;",
        before=".extern .shared .align 16 .b8 dynamic[];\n.const .align 4 .u32 table[4] = {5, 0x10, 3, 0xFFFFFFFF};",
    )
    y = np.zeros(4, np.uint32)
    module.launch("k", 1, 4, (words(1), y), shared=16)
    np.testing.assert_array_equal(y, [5, 16, 3, 0xFFFFFFFF])


@pytest.mark.parametrize("count", [0, 4, 12, 16])
def test_an_asynchronous_copy_fills_with_zeros(count: int) -> None:
    module = kernel(
        f"mov.u32 %r1, tile; cp.async.cg.shared.global [%r1], [%x], 16, {count}; cp.async.commit_group;"
        "cp.async.wait_group 0; ld.shared.v4.u32 {%r1, %r2, %r3, %r4}, [tile];"
        "st.global.v4.u32 [%y], {%r1, %r2, %r3, %r4};",
        before=".shared .align 16 .b8 tile[16];",
    )
    x, y = words(4), np.ones(4, np.uint32)
    module.launch("k", 1, 1, (x, y))
    np.testing.assert_array_equal(y, np.where(np.arange(4) < count // 4, x, 0))


@pytest.mark.parametrize(
    ("mode", "source"),
    [
        ("up.b32 %r2|%p1, %r1, 3, 0", lambda lane: lane - 3),
        ("down.b32 %r2|%p1, %r1, 5, 31", lambda lane: lane + 5),
        ("bfly.b32 %r2|%p1, %r1, 6, 31", lambda lane: lane ^ 6),
        ("idx.b32 %r2|%p1, %r1, 9, 31", lambda lane: 9),
    ],
)
def test_shuffles(mode: str, source: object) -> None:
    module = kernel(
        "mul.wide.u32 %a, %t, 4; add.u64 %x, %x, %a; ld.global.u32 %r1, [%x];"
        f"shfl.sync.{mode}, 0xffffffff; selp.u32 %r3, 1, 0, %p1; mul.wide.u32 %a, %t, 8; add.u64 %y, %y, %a;"
        "st.global.v2.u32 [%y], {%r2, %r3};"
    )
    x, y = words(32), np.zeros((32, 2), np.uint32)
    module.launch("k", 1, 32, (x, y))
    for lane in range(32):
        other = source(lane)  # type: ignore[operator]
        inside = 0 <= other < 32
        assert list(y[lane]) == [x[other if inside else lane], inside], lane


def test_votes_atomics_and_masks_of_lanes() -> None:
    module = kernel(
        "mul.wide.u32 %a, %t, 4; add.u64 %b, %x, %a; ld.global.u32 %r1, [%b]; setp.lt.s32 %p1, %r1, 0;"
        "vote.sync.ballot.b32 %r2, %p1, 0xffffffff; mov.u32 %r3, %lanemask_lt; and.b32 %r3, %r3, %r2;"
        "popc.b32 %r4, %r3; atom.global.add.u32 %r5, [%y], %r4; red.global.max.u32 [%y+4], %r4;"
        "atom.global.cas.b32 %r6, [%y+8], %t, 77; atom.global.exch.b32 %r7, [%y+12], %r2;"
        "vote.sync.any.pred %p2, %p1, 0xffffffff; selp.u32 %r8, 1, 0, %p2; st.global.u32 [%y+16], %r8;"
    )
    x, y = words(32), np.zeros(5, np.uint32)
    y[2] = 31
    module.launch("k", 1, 32, (x, y))
    negative = x.astype(np.int32) < 0
    below = np.concatenate([[0], np.cumsum(negative)[:-1]])
    ballot = int(sum(1 << lane for lane in range(32) if negative[lane]))
    np.testing.assert_array_equal(y, [below.sum(), below.max(), 77, ballot, 1])


def test_functions_loops_and_tables_of_branches() -> None:
    before = (
        ".func (.param .b32 out) cube(.param .b32 value) { .reg .b32 %v, %w; ld.param.b32 %v, [value];"
        " mul.lo.u32 %w, %v, %v; mul.lo.u32 %w, %w, %v; st.param.b32 [out], %w; ret; }"
    )
    module = kernel(
        "mul.wide.u32 %a, %t, 4; add.u64 %y, %y, %a; mov.u32 %r1, 0; mov.u32 %r2, 0;\n"
        "LOOP: setp.ge.u32 %p1, %r2, %t; @%p1 bra DONE;\n"
        "{ .param .b32 given; .param .b32 result; st.param.b32 [given], %r2; call.uni (result), cube, (given);\n"
        " ld.param.b32 %r3, [result]; }\n add.u32 %r1, %r1, %r3; add.u32 %r2, %r2, 1; bra.uni LOOP;\n"
        "DONE: and.b32 %r4, %t, 1; TARGETS: .branchtargets EVEN, ODD; brx.idx %r4, TARGETS;\n"
        "ODD: neg.s32 %r1, %r1;\nEVEN: st.global.u32 [%y], %r1;",
        before=before,
    )
    y = np.zeros(8, np.int32)
    module.launch("k", 1, 8, (words(1), y))
    expected = [sum(i**3 for i in range(n)) for n in range(8)]
    np.testing.assert_array_equal(y, [-v if n % 2 else v for n, v in enumerate(expected)])


def test_tensor_cores_multiply_what_ldmatrix_loads() -> None:
    """A [16, 16] and B [8, 16] are in shared memory as rows of float16; the kernel computes A B^T, [16, 8]."""
    module = kernel(
        "mul.wide.u32 %a, %t, 16; add.u64 %b, %x, %a; mov.u32 %r1, tile; shl.b32 %r2, %t, 4; add.u32 %r2, %r1, %r2;"
        "cp.async.cg.shared.global [%r2], [%b], 16; add.u64 %b, %b, 512; add.u32 %r2, %r2, 512;"
        "setp.lt.u32 %p1, %t, 16; @%p1 cp.async.cg.shared.global [%r2], [%b], 16; cp.async.wait_all; bar.warp.sync -1;"
        # Lanes 0 to 15 give ldmatrix the addresses of A's rows, lanes 16 to 31 those of columns 8 to 15 of the rows.
        "and.b32 %r3, %t, 15; shl.b32 %r3, %r3, 5; shr.u32 %r4, %t, 4; shl.b32 %r4, %r4, 4; add.u32 %r3, %r3, %r4;"
        "add.u32 %r3, %r1, %r3; ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r5, %r6, %r7, %r8}, [%r3];"
        # Fragment of B: elements k = 2 (t % 4) and k + 1 of column t / 4, and those at k + 8 and k + 9.
        "shr.u32 %r9, %t, 2; shl.b32 %r9, %r9, 5; and.b32 %r10, %t, 3; shl.b32 %r10, %r10, 2; add.u32 %r9, %r9, %r10;"
        "add.u32 %r9, %r1, %r9; ld.shared.b32 %r11, [%r9+512]; ld.shared.b32 %r12, [%r9+528];"
        "mov.f32 %f1, 0f00000000; mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f2, %f3, %f4, %f5},"
        " {%r5, %r6, %r7, %r8}, {%r11, %r12}, {%f1, %f1, %f1, %f1};"
        "mul.wide.u32 %a, %t, 16; add.u64 %y, %y, %a; st.global.v4.f32 [%y], {%f2, %f3, %f4, %f5};",
        before=".shared .align 16 .b8 tile[768];",
    )
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-8, 9, (rows, 16)).astype(np.float16) for rows in (16, 8))
    y = np.zeros((32, 4), np.float32)
    module.launch("k", 1, 32, (np.concatenate([a, b]), y))
    expected = a.astype(np.float32) @ b.astype(np.float32).T
    for lane in range(32):
        row, column = lane // 4, lane % 4 * 2
        np.testing.assert_array_equal(
            y[lane], [*expected[row, column : column + 2], *expected[row + 8, column : column + 2]]
        )


# ---- errors ----


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "wgmma.fence.sync.aligned;",
            "PTX line 8, `wgmma.fence.sync.aligned`: the instruction wgmma is not",
        ),
        ("mov.u32 %r1, %pm0;", r"line 8, .*: the special register %pm0 is not supported"),
        ("ld.global.u32 %nothing, [%x];", "%nothing is not declared"),
        ("add.u32 %r1, %r2;", "the operands or the modifiers do not fit add"),
        (
            "cvt.rn.f16.f64.satfinite %r1, %x;",
            "the modifier .satfinite is supported for conversions to .e4m3x2 and .e5m2x2 only, got .f16",
        ),
        ("mul.f32.f16 %r1, %r2, %r3;", "`mul.f32.f16 .*`: expected one known type, got f32, f16"),
        ("bra NOWHERE;", "NOWHERE"),
        ("add.u32 %r1, %r2, %r3", "expected"),
        ("bar.arrive 1;", "expected .sync, .arrive with a count of threads"),
        ("bar.sync 1, 64;", "a barrier waits for more threads than the block has"),
        ("trap;", r"trap: kernel k, block \(0,0,0\), thread \(0,0,0\): trap in line 8 of the PTX"),
    ],
)
def test_errors_name_line_and_instruction(body: str, message: str) -> None:
    with pytest.raises(emulator.EmulatorError, match=message):
        kernel(body).launch("k", 1, 1, (words(1), words(1)))


@pytest.mark.parametrize(
    ("body", "finding"),
    [
        ("ld.global.u32 %r1, [%x+4]; st.global.u32 [%y], %r1;", "out-of-bounds: kernel k.* reads 4 bytes"),
        ("st.global.v2.u32 [%y+8], {%t, %t};", "out-of-bounds: kernel k.* writes 8 bytes"),
        ("ld.shared.u32 %r1, [tile+60]; st.global.u32 [%y], %r1;", "uninitialized|unwritten|nothing has written"),
        ("setp.eq.u32 %p1, %t, 0; @%p1 bar.sync 0;", "barrier"),
    ],
)
def test_the_checking_mode_finds_faults(body: str, finding: str) -> None:
    module = kernel(body, before=".shared .align 4 .b8 tile[64];")
    with pytest.raises(emulator.EmulatorError, match=finding):
        module.launch("k", 1, 2 if "bar" in body else 1, (words(1), words(2)))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((words(1),), "got 1 arguments, expected 2"),
        ((words(1), 2**64), "expected an integer of 8 bytes"),
        ((words(1), np.float32(1)), "got float32 of 4 bytes, expected 8 bytes"),
        ((words(4)[::2], words(1)), "not C-contiguous"),
    ],
)
def test_arguments_that_do_not_fit(args: tuple[object, ...], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        kernel("").launch("k", 1, 1, args)  # type: ignore[arg-type]


def test_a_module_names_its_kernels() -> None:
    module = kernel("")
    assert module.kernels == ("k",)
    with pytest.raises(
        emulator.EmulatorError, match=r"the module has no kernel of this name\. Kernels of the module: k"
    ):
        module.launch("other", 1, 1, ())


def test_the_checking_mode_of_sessions_stays_as_it_is() -> None:
    before = current()
    module = kernel("ld.global.u32 %r1, [%x+4]; st.global.u32 [%y], %r1;")
    module.launch("k", 1, 1, (words(2), words(1)))
    assert current() == before
    with pytest.raises(emulator.EmulatorError, match="out-of-bounds"):
        module.launch("k", 1, 1, (words(1), words(1)))
    assert current() == before
