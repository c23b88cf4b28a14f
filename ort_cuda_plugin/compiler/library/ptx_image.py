"""Module images with PTX, in the formats that the CUDA driver accepts: PTX text or a fatbin. The emulated device gets
an object that is compiled from the PTX.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from ...abi.errors import Error
from ..targets import Target

FATBIN_MAGIC = b"\x50\xed\x55\xba"
PTX_ENTRY = 1
"""Value of the field ``kind`` of a fatbin's entry that contains PTX."""
LZ4, ZSTD = 0x2000, 0x8000
"""Flags of compressed entries of a fatbin."""
ENTRY_HEADER = struct.Struct("<HHIQIIHHIIIQQQ")
"""Header of a fatbin's entry: kind, version, bytes of the header, of the padded payload and of the compressed payload,
options, minor and major version of PTX, architecture, offset and bytes of the name, flags, reserved, bytes of the
uncompressed payload.
"""


class ImageError(Error):
    """The emulated device cannot load the image; the message says why, and what to do."""

    ort_code = 2  # ORT_INVALID_ARGUMENT


def object_of(compiler: Any, image: bytes, target: Target) -> bytes:
    """Compile all kernels of an image into one object for the emulated device.

    ``compiler`` is the module `ort_cuda_plugin.compiler.compile`. Raises ImageError.
    """
    try:
        compiled: bytes = compiler.compile_ptx_module(compiler.parse(ptx_text(image)), target)
    except compiler.PtxError as error:
        raise ImageError(str(error)) from error
    return compiled


def ptx_text(image: bytes) -> str:
    """Return the PTX of an image: the text itself, or the newest PTX of a fatbin. Raises ImageError."""
    if image.startswith(b"\x7fELF"):
        raise ImageError("the image is a cubin, machine code of a GPU, which the emulated device cannot run. Give PTX")
    return newest_ptx(image) if image.startswith(FATBIN_MAGIC) else decoded(image)


def decoded(image: bytes) -> str:
    try:
        return image.rstrip(b"\0 \n").decode()
    except UnicodeDecodeError as error:
        raise ImageError(f"the image is not PTX text: {error}") from error


# ---- fatbins ----


def newest_ptx(image: bytes) -> str:
    """Return a fatbin's PTX for the newest architecture. Raises ImageError."""
    try:
        found = list(entries(image))
    except struct.error:
        raise ImageError(
            "fatbin: an entry lies outside of the image, so the image is damaged or incomplete. Compile it again"
        ) from None
    texts = [(arch, payload, flags, size) for kind, arch, payload, flags, size in found if kind == PTX_ENTRY]
    if not texts:
        raise ImageError(
            f"fatbin: no PTX among its {len(found)} entries. Compile with PTX, as by nvcc -gencode "
            "arch=compute_80,code=compute_80: cubins are machine code, which the emulated device cannot run"
        )
    _, payload, flags, size = max(texts, key=lambda each: each[0])
    if flags & ZSTD:
        raise ImageError("fatbin: its PTX is compressed with zstd. Compile with nvcc --no-compress")
    return decoded(expanded(payload, size) if flags & LZ4 else payload)


def entries(image: bytes) -> Iterator[tuple[int, int, bytes, int, int]]:
    """Yield (kind, architecture, payload, flags, bytes of the uncompressed payload) of each entry.
    Raises struct.error.
    """
    header_bytes, total = struct.unpack_from("<HQ", image, 6)
    at, end = header_bytes, header_bytes + total
    while at < end:
        kind, _, header, padded, packed, _, _, _, arch, _, _, flags, _, size = ENTRY_HEADER.unpack_from(image, at)
        at += header
        if at + padded > len(image):
            raise struct.error
        yield kind, arch, image[at : at + (packed or padded)], flags, size
        at += padded


def expanded(data: bytes, size: int) -> bytes:
    """Decompress an LZ4 block to ``size`` bytes. Raises ImageError."""
    out, at = bytearray(), 0

    def length(start: int) -> int:
        nonlocal at
        while start >= 15:
            more = data[at]
            at += 1
            start += more
            if more < 255:
                break
        return start

    try:
        while len(out) < size:
            token = data[at]
            at += 1
            literals = length(token >> 4)
            out += data[at : at + literals]
            at += literals
            if len(out) >= size:
                break
            distance = data[at] | data[at + 1] << 8
            at += 2
            for _ in range(length(token & 15) + 4):
                out.append(out[-distance])
    except IndexError:
        raise ImageError("fatbin: its compressed PTX is damaged. Compile the fatbin again") from None
    return bytes(out[:size])
