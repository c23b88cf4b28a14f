"""The checking mode of PTX: misaligned accesses, races in shared memory, and copies that nothing has waited for."""

from __future__ import annotations

import numpy as np
import pytest

from ort_cuda_plugin import emulator

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n.shared .align 16 .b8 tile[1024];\n"
OTHER = "xor.b32 %o, %t, {}; shl.b32 %o, %o, 2; add.u32 %o, %o, %s; ld.shared.u32 %r, [%o]; st.global.u32 [%y], %r;"
"""Reads the word of the thread whose number differs by a mask."""
USED = "st.global.u32 [%y], %r;"
MINE = "st.shared.u32 [%m], %t;"
FROM = "cvt.u64.u32 %a, %m; cp.async.ca.shared.global [%m], [%x], 4;"


def run(body: str, threads: int = 64) -> None:
    """Run a kernel: %t is the thread, %s the address of a tile, %m of the thread's word there, %x and %y its words."""
    module = emulator.load(
        f"{HEAD}.visible .entry k(.param .u64 x, .param .u64 y) {{\n"
        ".reg .b64 %x, %y, %a; .reg .b32 %t, %s, %m, %o, %r, %w, %q; .reg .pred %p; .reg .b16 %h;\n"
        "ld.param.u64 %x, [x]; ld.param.u64 %y, [y]; mov.u32 %t, %tid.x; mov.u32 %s, tile; shl.b32 %m, %t, 2;"
        "cvt.u64.u32 %a, %m; add.u64 %x, %x, %a; add.u64 %y, %y, %a; add.u32 %m, %m, %s; shr.u32 %w, %t, 5;"
        f"\n{body}\nret;\n}}"
    )
    module.launch("k", 1, threads, (np.arange(threads, dtype=np.uint32), np.zeros(threads, np.uint32)))


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
        ("ld.shared.u32 %r, [%m];" + USED, "uninitialised-read: "),
        ("setp.lt.u32 %p, %t, 5; @%p bar.sync 0;", "divergent-barrier: "),
    ],
)
def test_a_fault_is_found(body: str, finding: str) -> None:
    with pytest.raises(emulator.EmulatorError, match=finding):
        run(body)


@pytest.mark.parametrize(
    "body",
    [
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
