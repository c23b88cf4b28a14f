"""PTX modules as the driver loads them: text, fatbins, linked modules, and variables that kernels of a module share."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest

from ort_cuda_plugin import emulator
from ort_cuda_plugin.abi.device import CudaError, Device
from ort_cuda_plugin.ep import boundary

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"
REGISTERS = ".reg .b64 %x; .reg .b32 %r<4>; ld.param.u64 %x, [x]; ld.global.u32 %r1, [%x];"
COUNTER = f"""{HEAD}
.global .align 4 .u32 total = 5;
.visible .entry add(.param .u64 x) {{ {REGISTERS} atom.global.add.u32 %r2, [total], %r1; ret; }}
.visible .entry get(.param .u64 x) {{
    .local .align 4 .b8 own[12]; .shared .align 4 .b8 tile[20];
    {REGISTERS} ld.global.u32 %r1, [total]; st.global.u32 [%x], %r1; ret;
}}
"""
FUNCTION = ".func (.param .b32 result) {}(.param .b32 given)"
CALL = "{{ .param .b32 in; .param .b32 out; st.param.b32 [in], %r1; call (out), {}, (in); ld.param.b32 %r1, [out]; }}"
CALLER = f"""{HEAD}
.extern {FUNCTION.format("twice")};
.extern .global .align 4 .u32 base;
{FUNCTION.format("own")} {{
    .reg .b32 %r; ld.param.b32 %r, [given]; add.u32 %r, %r, 1; st.param.b32 [result], %r; ret; }}
.visible .entry k(.param .u64 x) {{
    {REGISTERS} {CALL.format("own")} {CALL.format("twice")}
    ld.global.u32 %r2, [base]; add.u32 %r1, %r1, %r2; st.global.u32 [%x], %r1; ret;
}}
"""
CALLEE = f"""{HEAD}
.visible .global .align 4 .u32 base = 100;
{FUNCTION.format("own")} {{
    .reg .b32 %r; ld.param.b32 %r, [given]; add.u32 %r, %r, %r; st.param.b32 [result], %r; ret; }}
.visible {FUNCTION.format("twice")} {{
    .reg .b32 %r1; ld.param.b32 %r1, [given]; {CALL.format("own")} st.param.b32 [result], %r1; ret;
}}
"""


def words(*values: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.array(values, np.uint32)


def fatbin(*entries: tuple[int, int, bytes, int, int]) -> bytes:
    """Return a fatbin. Each entry: kind (1 PTX, 2 cubin), architecture, payload, flags, uncompressed bytes."""
    body = b""
    for kind, arch, payload, flags, size in entries:
        padded = payload + bytes(-len(payload) % 8)
        packed = len(payload) if flags else 0
        body += struct.pack("<HHIQIIHHIIIQQQ", kind, 257, 64, len(padded), packed, 0, 0, 8, arch, 0, 0, flags, 0, size)
        body += padded
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def lz4(data: bytes) -> bytes:
    """Return an LZ4 block: the data and a space as literals, then one match that repeats the space 300 times."""

    def lengths(size: int) -> bytes:
        return b"" if size < 15 else b"\xff" * ((size - 15) // 255) + bytes([(size - 15) % 255])

    literals = data + b" "
    head = bytes([min(len(literals), 15) << 4 | 15]) + lengths(len(literals)) + literals
    return head + b"\x01\x00" + lengths(300 - 4) + b"\x00"


def test_kernels_of_a_module_share_its_variables() -> None:
    module = emulator.load(COUNTER)
    y = words(0)
    module.launch("add", 1, 1, (words(7),))
    module.launch("add", 2, 1, (words(1),))
    module.launch("get", 1, 1, (y,))
    assert y[0] == 14
    assert module.resources("get") == emulator.Resources(registers=6, shared_bytes=32, local_bytes=12)


def test_linked_modules_call_each_other() -> None:
    x = words(20)
    emulator.load([CALLER, CALLEE]).launch("k", 1, 1, (x,))
    assert x[0] == 2 * (20 + 1) + 100
    with pytest.raises(emulator.EmulatorError, match=r"twice is declared, but not defined"):
        emulator.load(CALLER).launch("k", 1, 1, (x,))
    with pytest.raises(emulator.EmulatorError, match=r"`twice`: two modules define this symbol"):
        emulator.load([CALLEE, CALLEE])


@pytest.mark.parametrize("flags", [0, 0x2000], ids=["plain", "lz4"])
def test_a_fatbin_gives_its_newest_ptx(flags: int, tmp_path: Path) -> None:
    text = COUNTER.encode()
    packed, size = (lz4(text), len(text) + 301) if flags else (text, 0)
    old = text.replace(b"total = 5", b"total = 6")
    (tmp_path / "k.fatbin").write_bytes(
        fatbin((2, 80, bytes(64), 0, 0), (1, 80, old, 0, 0), (1, 90, packed, flags, size))
    )
    y = words(0)
    emulator.load(tmp_path / "k.fatbin").launch("get", 1, 1, (y,))
    assert y[0] == 5


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (fatbin((2, 80, bytes(64), 0, 0)), "fatbin: no PTX among its 1 entries"),
        (fatbin((1, 80, b"x" * 8, 0x8000, 64)), "compressed with zstd"),
        (fatbin((1, 80, b"\xf0", 0x2000, 64)), "its compressed PTX is damaged"),
        (fatbin((1, 80, bytes(64), 0, 0))[:50], "an entry lies outside of the image"),
        (b"\x7fELF\x02\x01\x01" + bytes(60), "the image is a cubin"),
        (b".version\xff", "not PTX text"),
    ],
)
def test_other_images_are_refused_with_a_reason(image: bytes, message: str) -> None:
    with pytest.raises(emulator.EmulatorError, match=message):
        emulator.load(image)


def test_the_driver_loads_ptx_and_fatbins() -> None:
    boundary.attach_own()
    device = Device.emulated()
    x = device.upload(words(7))
    for image in (COUNTER.encode() + b"\0", fatbin((1, 80, COUNTER.encode(), 0, 0))):
        module = device.load(image)
        module.launch("add", 1, 1, [x])
        module.launch("get", 1, 1, [x])
    assert device.download(x)[0] == 17
    expected = re.escape("PTX line 6, `atom.global.foo.u32 %r2, [total], %r1`: the modifier .foo is not supported")
    with pytest.raises(CudaError, match=f"CUDA_ERROR_INVALID_PTX.*{expected}"):
        device.load(COUNTER.replace("atom.global.add", "atom.global.foo").encode())
