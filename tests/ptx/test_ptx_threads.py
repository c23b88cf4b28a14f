"""PTX on the emulated device: named barriers, mbarriers, match and redux in a warp, float16 atomics, assert, clocks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from ort_cuda_plugin import emulator

HEAD = ".version 8.6\n.target sm_90\n.address_size 64\n"


def run(
    body: str, threads: int, words: int, before: str = "", x: npt.NDArray[np.uint32] | None = None
) -> npt.NDArray[np.uint32]:
    """Run a kernel, and return each thread's ``words`` results.

    Registers: %t number of the thread, %w of its warp; %x address of the array ``x``, %y of the thread's results.
    """
    module = emulator.load(
        f"{HEAD}{before}\n.visible .entry k(.param .u64 x, .param .u64 y) {{\n"
        ".reg .b64 %x, %y, %a, %b; .reg .b32 %t, %w, %r<16>; .reg .b16 %h<8>; .reg .pred %p<4>;\n"
        f"ld.param.u64 %x, [x]; ld.param.u64 %y, [y]; mov.u32 %t, %tid.x; shr.u32 %w, %t, 5;\n"
        f"mul.wide.u32 %a, %t, {4 * words}; add.u64 %y, %y, %a;\n{body}\nret;\n}}"
    )
    y = np.zeros((threads, words), np.uint32)
    module.launch("k", 1, threads, (np.arange(64, dtype=np.uint32) if x is None else x, y))
    return y


def test_a_producer_arrives_and_a_consumer_waits_at_a_numbered_barrier() -> None:
    body = (
        "mul.wide.u32 %b, %t, 4; cvt.u32.u64 %r1, %b; mov.u32 %r2, tile; setp.eq.u32 %p1, %w, 0; @%p1 bra CONSUMER;\n"
        "add.u32 %r3, %r1, %r2; mul.lo.u32 %r4, %t, 3; st.shared.u32 [%r3+-128], %r4; bar.arrive 3, 64; bra END;\n"
        "CONSUMER: bar.sync 3, 64; xor.b32 %r1, %r1, 124; add.u32 %r3, %r1, %r2; ld.shared.u32 %r5, [%r3];"
        " st.global.u32 [%y], %r5;\nEND:"
    )
    y = run(body, 64, 1, ".shared .align 4 .b8 tile[128];")
    np.testing.assert_array_equal(y[:32, 0], 3 * (63 - np.arange(32)))


def test_groups_of_warps_wait_at_barriers_of_their_own() -> None:
    body = (
        "shr.u32 %r1, %w, 1; add.u32 %r1, %r1, 1; mul.lo.u32 %r2, %t, 4; mov.u32 %r3, tile; add.u32 %r2, %r2, %r3;"
        "st.shared.u32 [%r2], %t; bar.sync %r1, 64; xor.b32 %r4, %t, 63; shl.b32 %r4, %r4, 2; add.u32 %r4, %r4, %r3;"
        "ld.shared.u32 %r5, [%r4]; st.global.u32 [%y], %r5;"
    )
    y = run(body, 128, 1, ".shared .align 4 .b8 tile[512];")
    np.testing.assert_array_equal(y[:, 0], np.arange(128) ^ 63)


def test_barriers_reduce_predicates() -> None:
    body = (
        "setp.lt.u32 %p1, %t, 40; barrier.cta.red.popc.aligned.u32 %r1, 0, %p1; bar.red.and.pred %p2, 1, %p1;"
        "bar.red.or.pred %p3, 1, %p1; selp.u32 %r2, 1, 0, %p2; selp.u32 %r3, 1, 0, %p3; st.global.u32 [%y], %r1;"
        "st.global.u32 [%y+4], %r2; st.global.u32 [%y+8], %r3;"
    )
    np.testing.assert_array_equal(run(body, 64, 3), [[40, 0, 1]] * 64)


def test_lanes_match_and_reduce() -> None:
    body = (
        "and.b32 %r1, %t, 3; match.any.sync.b32 %r2, %r1, 0xffffffff; match.all.sync.b32 %r3|%p1, %w, 0xffffffff;"
        "selp.u32 %r4, 1, 0, %p1; cvt.u64.u32 %a, %t; shl.b64 %a, %a, 33; match.any.sync.b64 %r5, %a, 0xffffffff;"
        "sub.u32 %r6, %t, 40; redux.sync.min.s32 %r7, %r6, 0xffffffff; redux.sync.max.u32 %r8, %t, 0xffffffff;"
        "redux.sync.add.s32 %r9, %t, 0xffffffff; redux.sync.xor.b32 %r10, %t, 0xffffffff; activemask.b32 %r11;"
        "and.b32 %r12, %t, 31; setp.ge.u32 %p1, %r12, 4; setp.ne.u32 %p2, %t, %t; mov.u32 %r12, 4;"
        "@%p1 elect.sync %r12|%p2, 0xfffffff0; selp.u32 %r13, 1, 0, %p2;"
    )
    body += "".join(f"st.global.u32 [%y+{4 * i}], %r{n};" for i, n in enumerate((2, 3, 4, 5, 7, 8, 9, 10, 11, 12, 13)))
    y = run(body, 64, 11)
    lanes = np.arange(64, dtype=np.uint32) % 32
    own = np.uint32(1) << lanes
    np.testing.assert_array_equal(y[:, 0], np.uint32(0x11111111) << (lanes & 3))
    np.testing.assert_array_equal(y[:, 1:3], [[0xFFFFFFFF, 1]] * 64)
    np.testing.assert_array_equal(y[:, 3], own)
    first = np.arange(64) // 32 * 32
    np.testing.assert_array_equal(y[:, 4].view(np.int32), first - 40)
    np.testing.assert_array_equal(y[:, 5], first + 31)
    np.testing.assert_array_equal(y[:, 6], first * 32 + 496)
    np.testing.assert_array_equal(y[:, 7], 0)
    np.testing.assert_array_equal(y[:, 8], own)
    np.testing.assert_array_equal(y[:, 9:], [[4, int(lane == 4)] for lane in lanes])


def test_halves_are_updated_atomically() -> None:
    body = (
        "cvt.rn.f16.u32 %h1, %t; atom.global.add.noftz.f16 %h2, [%x], %h1; mov.b32 %r1, {%h1, %h1};"
        "red.global.add.noftz.f16x2 [%x+4], %r1; mov.b16 %h3, 0x3F80; red.global.add.noftz.bf16 [%x+8], %h3;"
        "red.global.v2.f32.add [%x+16], {%t, 0f3F800000};"
    )
    x = np.zeros(6, np.uint32)
    run(body, 32, 1, x=x)
    halves = x.view(np.float16)
    assert halves[0] == halves[2] == halves[3] == 496
    assert (x[2] << np.uint32(16)).view(np.float32) == 32
    assert x[5:].view(np.float32)[0] == 32


def test_a_failed_assertion_names_its_text_and_thread() -> None:
    before = (
        ".extern .func __assertfail(.param .b64 a, .param .b64 b, .param .b32 c, .param .b64 d, .param .b64 e);\n"
        ".global .align 1 .b8 text[6] = {110, 32, 62, 32, 48, 0};\n"
    )
    body = (
        "setp.ne.u32 %p1, %t, 3; @%p1 bra FINE; mov.u64 %a, text; cvta.global.u64 %b, %a;\n"
        "{ .param .b64 p0; st.param.b64 [p0], %b; .param .b64 p1; st.param.b64 [p1], %b; .param .b32 p2;"
        " st.param.b32 [p2], 12; .param .b64 p3; st.param.b64 [p3], %b; .param .b64 p4; st.param.b64 [p4], 1;\n"
        " call.uni __assertfail, (p0, p1, p2, p3, p4); }\nFINE:"
    )
    with pytest.raises(emulator.EmulatorError, match=r"thread \(3,0,0\): n > 0:12: n > 0: assertion `n > 0` failed"):
        run(body, 32, 1, before)


def test_threads_wait_at_an_mbarrier() -> None:
    module = emulator.load(
        f"{HEAD}.shared .align 8 .b64 barrier; .shared .align 4 .b8 tile[256];\n.visible .entry k(.param .u64 y) {{\n"
        ".reg .b64 %y, %a, %s; .reg .b32 %t, %m, %o, %r; .reg .pred %p, %q;\n"
        "ld.param.u64 %y, [y]; mov.u32 %t, %tid.x; setp.eq.u32 %p, %t, 0; mul.wide.u32 %a, %t, 4; add.u64 %y, %y, %a;\n"
        "@%p mbarrier.init.shared.b64 [barrier], 64; bar.sync 0;"
        "mov.u32 %m, tile; shl.b32 %o, %t, 2; add.u32 %o, %o, %m;"
        "st.shared.u32 [%o], %t; mbarrier.arrive.shared.b64 %s, [barrier];\n"
        "wait: mbarrier.test_wait.shared.b64 %q, [barrier], %s; @!%q bra wait;\n"
        "xor.b32 %o, %t, 63; shl.b32 %o, %o, 2; add.u32 %o, %o, %m; ld.shared.u32 %r, [%o]; st.global.u32 [%y], %r;\n"
        "mbarrier.arrive.release.cta.shared::cta.b64 _, [barrier];\n"
        "again: mbarrier.try_wait.parity.shared.b64 %q, [barrier], 1; @!%q bra again;\n"
        "@%p mbarrier.inval.shared.b64 [barrier]; ret;\n}"
    )
    y = np.zeros(64, np.uint32)
    module.launch("k", 1, 64, (y,))
    np.testing.assert_array_equal(y, np.arange(64)[::-1])


def test_clocks_advance() -> None:
    module = emulator.load(
        f"{HEAD}.visible .entry k(.param .u64 y) {{ .reg .b64 %y, %a, %b; .reg .b32 %c; ld.param.u64 %y, [y];"
        "mov.u64 %a, %globaltimer; mov.u32 %c, %clock; mov.u64 %b, %clock64; sub.u64 %a, %b, %a;"
        "st.global.u64 [%y], %a; st.global.u32 [%y+8], %c; ret; }"
    )
    y = np.full(2, -1, np.int64)
    module.launch("k", 1, 1, (y,))
    assert 0 <= y[0] < 10**9
