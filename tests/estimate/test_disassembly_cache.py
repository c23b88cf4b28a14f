"""The disk cache of disassembled kernels."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from ort_cuda_plugin.compiler.caches import disassembly_cache
from ort_cuda_plugin.compiler.caches.disassembly_cache import DisassemblyCache
from ort_cuda_plugin.compiler.targets import KernelImage, Target
from ort_cuda_plugin.estimate import sass


def test_a_kernel_is_disassembled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool, calls = tmp_path / "nvdisasm", tmp_path / "calls"
    tool.write_text(f"#!/bin/sh\necho call >> {calls}\necho '/*0000*/ LDG.E.128 R0, [R2] ;'\n")
    tool.chmod(0o755)
    cache = DisassemblyCache(tmp_path / "cache")
    monkeypatch.setattr(sass, "disassembler", lambda: str(tool))
    monkeypatch.setattr(sass, "disassembly_cache", lambda: cache)
    images = [KernelImage(b"\x7fELF" + part, "k", Target.cuda(9, 0)) for part in (b"one", b"two")]
    texts = [sass.disassembled(image) for image in (*images, *images)]
    assert texts == ["/*0000*/ LDG.E.128 R0, [R2] ;\n"] * 4
    assert calls.read_text().count("call") == 2
    tool.write_text(tool.read_text() + "# another version\n")
    sass.disassembled(images[0])
    assert calls.read_text().count("call") == 3


def test_a_damaged_entry_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvdisasm"
    tool.write_text("")
    cache = DisassemblyCache(tmp_path / "cache")
    key = disassembly_cache._key(b"cubin", tool)
    assert cache.load(b"cubin", tool) is None
    for body in (b"not deflated", zlib.compress(b"text")[:-2], zlib.compress(b"\xff\xfe")):
        cache.write(key, body)
        assert cache.load(b"cubin", tool) is None
    cache.keep(b"cubin", tool, "text")
    assert cache.load(b"cubin", tool) == "text"
    monkeypatch.setattr(disassembly_cache, "max_text_bytes", 3)
    assert cache.load(b"cubin", tool) is None
