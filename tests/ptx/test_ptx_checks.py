"""The checking mode for PTX: misaligned accesses, races in and between blocks, unwritten local memory, wrong masks."""

from __future__ import annotations

import numpy as np
import pytest

from ort_cuda_plugin import emulator

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n.shared .align 16 .b8 tile[1024];\n"
OTHER = "xor.b32 %o, %t, {}; shl.b32 %o, %o, 2; add.u32 %o, %o, %s; ld.shared.u32 %r, [%o]; st.global.u32 [%y], %r;"
"""Copies the shared word of thread ``%t ^ {}`` to y."""
USED = "st.global.u32 [%y], %r;"
MINE = "st.shared.u32 [%m], %t;"
MASKED = "and.b32 %q, %t, 31; setp.ne.u32 %p, %q, 0; selp.u32 %q, -1, 0xfffffffe, %p;"
"""Sets %q to the mask of all lanes; in lane 0, to the mask of all lanes but lane 0."""
SHIFTED = "mov.u32 %w, %ctaid.x; shl.b32 %q, %w, 7; cvt.u64.u32 %a, %q; add.u64 %a, %y, %a;"
"""Sets %w to the number of the block, and %a to the address of the word of this thread and block in y."""
OWN = SHIFTED + "st.global.u32 [%a], %t;"
TICKET = "atom.global.add.u32 %r, [%x], 1;"
LAST = "setp.eq.u32 %p, %w, 0; @%p ret; ld.global.u32 %r, [%y]; st.global.u32 [%a], %r;"
"""Ends block 0; the other blocks read words that block 0 has written."""
LOCAL = ".local .align 8 .b8 own[16];"
LOCK = (
    "setp.eq.u32 %p, %t, 0; @%p st.shared.v2.u32 [%s], {{0, 0}}; bar.sync 0;"
    "again: atom.shared.cas.b32 %r, [%s], 0, 1; setp.ne.u32 %p, %r, 0; @%p bra again; {0}"
    "ld.shared.u32 %q, [%s+4]; add.u32 %q, %q, %t; st.shared.u32 [%s+4], %q; {0} atom.shared.exch.b32 %r, [%s], 0;"
)
FROM = "cvt.u64.u32 %a, %m; cp.async.ca.shared.global [%m], [%x], 4;"


def run(body: str, threads: int = 64, blocks: int = 1) -> None:
    """Run a kernel with these registers: %t number of the thread, %w of its warp, %s address of a shared tile.

    %m is the address of the thread's word in the tile; %x and %y are the addresses of its words in the arrays.
    """
    module = emulator.load(
        f"{HEAD}.visible .entry k(.param .u64 x, .param .u64 y) {{\n"
        ".reg .b64 %x, %y, %a; .reg .b32 %t, %s, %m, %o, %r, %w, %q; .reg .pred %p; .reg .b16 %h;\n"
        "ld.param.u64 %x, [x]; ld.param.u64 %y, [y]; mov.u32 %t, %tid.x; mov.u32 %s, tile; shl.b32 %m, %t, 2;"
        "cvt.u64.u32 %a, %m; add.u64 %x, %x, %a; add.u64 %y, %y, %a; add.u32 %m, %m, %s; shr.u32 %w, %t, 5;"
        f"\n{body}\nret;\n}}"
    )
    x, y = np.arange(threads, dtype=np.uint32), np.zeros(blocks * threads, np.uint32)
    module.launch("k", blocks, threads, (x, y))


@pytest.mark.parametrize(
    ("body", "finding"),
    [
        (
            "ld.global.v2.u32 {%r, %q}, [%x];" + USED,
            r"misaligned: kernel k, .* thread \(1,0,0\) .* not a multiple of 8",
        ),
        ("st.shared.u16 [%s+3], 1;", "misaligned: .* not a multiple of 2"),
        ("atom.global.add.u32 %r, [%x+2], 1;", "misaligned: .* not a multiple of 4"),
        ("cp.async.cg.shared.global [%s+8], [%x], 16;", "misaligned: .* not a multiple of 16"),
        (MINE + OTHER.format(32), r"race: .* thread \(32,0,0\) writes 4 bytes at .* thread \(0,0,0\) reads, with no"),
        (MINE + OTHER.format(1), "race: "),
        (MINE + "bar.warp.sync 0xffffffff;" + OTHER.format(32), "race: "),
        (MINE + "bar.sync 0;" + OTHER.format(3) + MINE, "race: "),
        ("st.shared.u32 [%s], %t;", "race: .* writes 4 bytes at .* writes, with no barrier"),
        (MINE + "add.u32 %q, %w, 1; bar.sync %q, 32;" + OTHER.format(32), "race: "),
        (
            FROM + "cp.async.commit_group; ld.shared.u32 %r, [%m];" + USED,
            "pending-copy: .* reads 4 bytes .* has not waited for",
        ),
        (FROM + "cp.async.commit_group; cp.async.wait_group 1; ld.shared.u32 %r, [%m];" + USED, "pending-copy: "),
        (FROM + "cp.async.wait_group 0; ld.shared.u32 %r, [%m];" + USED, "pending-copy: "),
        (FROM + "cp.async.wait_all;" + OTHER.format(1), "race: "),
        ("ld.global.u32 %r, [%y+4096];" + USED, "out-of-bounds: "),
        ("ld.shared.u32 %r, [%m];" + USED, "uninitialized-read: "),
        ("setp.lt.u32 %p, %t, 5; @%p bar.sync 0;", "divergent-barrier: "),
        (
            "setp.lt.u32 %p, %t, 5; @%p bar.warp.sync -1; bar.sync 0;",
            "divergent-barrier: .* lane 0 of warp 0 waits for lanes 0xffffffe0 of its mask, which are elsewhere",
        ),
        (
            MASKED + "bar.warp.sync %q;",
            r"invalid-mask: .* \(0,0,0\): the mask 0xfffffffe of bar.warp.sync leaves out the",
        ),
        (
            MASKED + "shfl.sync.idx.b32 %r, %t, 0, 31, %q;",
            "invalid-mask: .* of shfl.sync leaves out the calling lane 0",
        ),
        (MASKED + "vote.sync.ballot.b32 %r, %p, %q;", "invalid-mask: .* of vote.sync"),
        (MASKED + "match.any.sync.b32 %r, %t, %q;", "invalid-mask: .* of match.sync"),
        (MASKED + "redux.sync.add.s32 %r, %t, %q;", "invalid-mask: .* of redux.sync"),
        (
            LOCAL + "st.local.u32 [own], %t; ld.local.v2.u32 {%r, %q}, [own];" + "add.u32 %r, %r, %q;" + USED,
            "uninitialized-read: .* reads 8 bytes at 0x0: byte 0 of 16 bytes of local memory",
        ),
        (
            LOCAL + "cvta.local.u64 %a, own; st.u32 [%a+12], %t; ld.u32 %r, [%a+8];" + USED,
            "uninitialized-read: .* byte 8 of 16 bytes of local memory",
        ),
        (
            LOCAL + "st.local.u32 [own+16], %t;",
            "out-of-bounds: .* writes 4 bytes .* byte 16 of 16 bytes of local memory",
        ),
        ("ld.global.nc.u32 %r, [%x]; st.global.u32 [%x], %r;", "read-only-written: .* writes .* by ld.global.nc"),
        ("st.global.u32 [%y], %t; ld.global.nc.u32 %r, [%y];" + USED, "read-only-written: .* reads 4 bytes"),
        (LOCK.format(""), "race: "),
    ],
)
def test_a_fault_is_found(body: str, finding: str) -> None:
    with pytest.raises(emulator.EmulatorError, match=finding):
        run(body)


@pytest.mark.parametrize(
    ("body", "does"),
    [
        (SHIFTED + "st.global.u32 [%y], %w;", "writes 4 bytes .* writes"),
        (OWN + LAST, r"block \(1,0,0\), thread \(0,0,0\) reads 4 bytes at .* block \(0,0,0\) writes, with no fence"),
        (
            SHIFTED + "ld.global.u32 %r, [%y]; st.global.u32 [%a+64], %r; setp.eq.u32 %p, %w, 0; @%p ret;"
            "st.global.u32 [%y], 9;",
            r"block \(1,0,0\), .* writes 4 bytes .* reads",
        ),
        (OWN + TICKET + LAST, "reads"),
        (OWN + "fence.acq_rel.cta;" + TICKET + LAST, "reads"),
    ],
)
def test_a_race_between_blocks_is_found(body: str, does: str) -> None:
    with pytest.raises(emulator.EmulatorError, match=f"race: .*{does}"):
        run(body, threads=32, blocks=2)


@pytest.mark.parametrize(
    "body",
    [
        OWN + "fence.acq_rel.gpu;" + TICKET + LAST,
        OWN + "membar.gl;" + TICKET + LAST,
        OWN + TICKET.replace("global.add", "acq_rel.gpu.global.add") + LAST,
        OWN + "st.release.gpu.global.u32 [%x], 1; ld.acquire.gpu.global.u32 %r, [%x];" + LAST,
        "st.global.u32 [%y], 7;",
        "ld.global.nc.u32 %r, [%x];" + SHIFTED + "st.global.u32 [%a], %r;",
        "red.global.add.u32 [%y], 1;",
        SHIFTED
        + "cvt.u16.u32 %h, %w; shl.b32 %q, %w, 1; cvt.u64.u32 %a, %q; add.u64 %a, %y, %a; st.global.u16 [%a], %h;",
    ],
)
def test_ordered_blocks_have_no_finding(body: str) -> None:
    run(body, threads=32, blocks=2)


@pytest.mark.parametrize(
    "body",
    [
        LOCK.format("membar.cta;"),
        LOCK.format("fence.acq_rel.cta;"),
        "setp.lt.u32 %p, %t, 40; @!%p ret; shfl.sync.idx.b32 %r, %t, 0, 31, -1;" + USED,
        "setp.lt.u32 %p, %t, 40; @%p bra low; bar.warp.sync 0xffffff00; ret; low: ret;",
        LOCAL + "st.local.v2.u32 [own+8], {%t, %t}; cvta.local.u64 %a, own; ld.u32 %r, [%a+12];" + USED,
        MINE + "bar.sync 0;" + OTHER.format(32) + "bar.sync 0;" + MINE,
        MINE + "bar.warp.sync 0xffffffff;" + OTHER.format(1) + "bar.warp.sync 0xffffffff;" + MINE,
        MINE + "bar.sync 1, 64;" + OTHER.format(33),
        "st.shared.u32 [%s], 7; st.shared.u32 [%s], 7;",
        "add.u32 %o, %s, %t; cvt.u16.u32 %h, %t; st.shared.u8 [%o], %h; ld.shared.u8 %h, [%o];",
        "st.shared.u32 [%s], 0; bar.sync 0; atom.shared.add.u32 %r, [%s], 1; bar.sync 0; ld.shared.u32 %r, [%s];",
        FROM + "cp.async.commit_group; cp.async.wait_group 0; ld.shared.u32 %r, [%m]; bar.sync 0;" + OTHER.format(7),
        FROM
        + "cp.async.commit_group; add.u32 %m, %m, 512; cp.async.ca.shared.global [%m], [%x], 4; cp.async.commit_group;"
        "cp.async.wait_group 1; sub.u32 %m, %m, 512; ld.shared.u32 %r, [%m];",
    ],
)
def test_right_code_has_no_finding(body: str) -> None:
    run(body)
