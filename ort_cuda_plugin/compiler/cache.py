"""The disk cache of compiled kernels and of their LLVM IR, shared by all processes of a user.

An entry's file name is a hash of everything that its contents depend on (`toolchain`). If an entry is damaged, or if
another user could have written it, the kernel is compiled again. Nothing here imports Numba or llvmlite.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

from ort_cuda_plugin.compiler.caches.cache_folder import CacheFolder, cache_folder, logger
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.compiler.targets import KernelImage, Target
from ort_cuda_plugin.compiler.toolchain import (
    Tools,
    decode_tools,
    encode_tools,
    installed_tools,
    is_complete,
    kernel_key,
)

max_cache_bytes = 512 << 20
max_entry_bytes = 64 << 20
"""Maximum size of one entry, and of the LLVM IR of one kernel, in bytes."""
tools_prefix = "tools-"
"""Prefix of the files that record with which tools entries were compiled, for processes that lack the tools."""
max_tools = 8


# ---- kernels ----


class KernelCache(CacheFolder):
    """Compiled kernels in one folder. If the folder is unusable, a warning is logged once, and the cache stays empty.

    ``folder`` defaults to `cache_folder`. ``max_bytes`` limits the sum of the entries' sizes: the least recently used
    entries are removed.
    """

    name = "kernel cache"
    suffix = ".kernel"
    magic = b"OCPK\x01\n"
    consequence = "Each process compiles its kernels again"
    remedy = "the process compiles the kernel again"
    max_entry_bytes = max_entry_bytes

    def __init__(self, folder: Path | None = None, max_bytes: int = max_cache_bytes) -> None:
        super().__init__(cache_folder() if folder is None else folder, max_bytes)
        self.noted: set[Tools] = set()
        self.foreign: dict[bool, list[Tools]] | None = None

    def tell_damaged(self, key: str) -> None:
        """Log that an entry is damaged: as a warning if this process cannot compile kernels for any device."""
        if any(is_complete(installed_tools(emulated)) for emulated in (True, False)):
            super().tell_damaged(key)
        else:
            logger.warning(
                "%s entry %s is damaged, and this process cannot compile the kernel again, because the compiler is not"
                ' installed. Install "ort-cuda-plugin[cpu]" or "ort-cuda-plugin[cuda]", or fill the cache again',
                self.name,
                self.path(key),
            )

    def load(self, key: str, target: Target) -> KernelImage | None:
        """Return the compiled kernel with ``key``; None if there is no entry, or if it is damaged."""
        return decode(self.read(key) or b"", target)

    def load_made(self, spec: KernelSpec, target: Target) -> KernelImage | None:
        """Return the kernel from the cache; None if it is missing.

        The kernel must have been compiled with the tools of this process. If this process lacks a tool, kernels that
        other processes compiled with their tools are accepted too.
        """
        for tools in (installed_tools(target.is_emulated), *self.others(target.is_emulated)):
            image = self.load(kernel_key(spec, target, tools), target)
            if image is not None:
                return image
        return None

    def others(self, emulated: bool) -> list[Tools]:
        """Return the tools of other processes whose kernels this process accepts, the latest first.

        The list is empty if this process has all tools, so that it can compile.
        """
        if is_complete(installed_tools(emulated)):
            return []
        if self.foreign is None:
            self.foreign = self.read_tools()
        return self.foreign[emulated]

    def read_tools(self) -> dict[bool, list[Tools]]:
        """Return the tools of the `max_tools` newest records of `note_tools`, newest first, for the emulated device
        (True) and for GPUs (False).
        """
        found: dict[bool, list[Tools]] = {False: [], True: []}
        if self.opened is not None and self.usable:
            notes = [(status.st_mtime, name) for name, status in self.opened.files() if name.startswith(tools_prefix)]
            for _, name in sorted(notes, reverse=True)[:max_tools]:
                tools = decode_tools(self.read_file(name) or b"")
                if tools is not None:
                    found[name.startswith(f"{tools_prefix}emulated-")].append(tools)
        return found

    def note_tools(self, emulated: bool) -> None:
        """Record in the folder with which tools this process compiles."""
        tools = installed_tools(emulated)
        if tools not in self.noted and self.writable:
            self.noted.add(tools)
            data, kind = encode_tools(tools), "emulated" if emulated else "cuda"
            self.write_file(f"{tools_prefix}{kind}-{hashlib.sha256(data).hexdigest()[:16]}.json", data)

    def store(self, key: str, image: KernelImage) -> None:
        """Store a compiled kernel under ``key``."""
        self.write(key, encode(image))

    def load_ir(self, key: str) -> list[str] | None:
        """Return the LLVM IR with ``key``: [mangled name of the kernel, modules...]; None if the entry is missing or
        damaged.
        """
        return decode_texts(self.read(key) or b"")

    def store_ir(self, key: str, texts: Sequence[str]) -> None:
        """Store the LLVM IR of a kernel: ``texts`` are the mangled name of the kernel and the modules."""
        self.write(key, encode_texts(texts))


# ---- contents of entries; a kernel's entry has three lengths, then JSON, image and PTX ----


def encode(image: KernelImage) -> bytes:
    header = json.dumps({"entry": image.entry, "metadata": dict(image.metadata)}).encode()
    return struct.pack("<III", len(header), len(image.data), len(image.ptx)) + header + image.data + image.ptx


def decode(body: bytes, target: Target) -> KernelImage | None:
    """Decode the contents of a kernel's entry; None if the bytes are malformed."""
    try:
        header_bytes, image_bytes, ptx_bytes = struct.unpack_from("<III", body)
        image_start = 12 + header_bytes
        ptx_start = image_start + image_bytes
        if ptx_start + ptx_bytes != len(body):
            return None
        header = json.loads(body[12:image_start])
        entry, metadata = header["entry"], header["metadata"]
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", entry):
            return None
        numbers = metadata.values() if isinstance(metadata, dict) else [None]
        if not all(type(number) is int and 0 <= number < 1 << 32 for number in numbers):
            return None
    except (struct.error, ValueError, TypeError, LookupError, RecursionError):
        return None
    return KernelImage(body[image_start:ptx_start], entry, target, metadata, body[ptx_start:])


def encode_texts(texts: Sequence[str]) -> bytes:
    return zlib.compress(json.dumps(list(texts)).encode(), 1)


def decode_texts(body: bytes) -> list[str] | None:
    """Decode the contents of an entry with LLVM IR; None if the bytes are malformed, or expand to more than
    `max_entry_bytes`.
    """
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(body, max_entry_bytes)
        texts = json.loads(data) if unpacker.eof else None
        if not isinstance(texts, list) or len(texts) < 2:
            return None
        "".join(texts).encode()  # raises an error for lone surrogates, which LLVM's UTF-8 cannot represent
    except (zlib.error, ValueError, TypeError, RecursionError):
        return None
    return texts
