"""The disk cache of compiled kernels and of their IR, shared by all processes of a user.

An entry's file name is a hash of all that its contents depend on. If an entry is damaged, or another user could have
written it, its kernel is compiled again.
Nothing here imports Numba or llvmlite.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import re
import struct
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from ort_cuda_plugin import uninterrupted
from ort_cuda_plugin.compiler.cache_folder import CacheFolder, cache_folder
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.compiler.targets import KernelImage, Target

max_cache_bytes = 512 << 20
max_entry_bytes = 64 << 20
"""Of an entry, and of the texts of an IR."""
front_end_sources = (
    "compiler/intrinsics.py",
    "compiler/small_floats.py",
    "compiler/front_end.py",
    "compiler/tile_intrinsics.py",
    "compiler/matrix_intrinsics.py",
    "compiler/vector_intrinsics.py",
    "compiler/host/matrices.py",
    "compiler/compile.py",
    "compiler/kernel.py",
)
"""The modules of this package that make IR of a kernel's source."""
back_end_sources = (
    "compiler/elf.py",
    "compiler/host/counts.py",
    "compiler/host/entry.py",
    "compiler/host/intrinsics.py",
    "compiler/host/ir.py",
    "compiler/host/math.py",
    "compiler/host/matrices.py",
    "compiler/host/vector_math.py",
    "compiler/targets.py",
)
"""Those that make machine code of the IR."""


# ---- keys ----


def kernel_key(spec: KernelSpec, target: Target) -> str:
    """Hex hash of the kernel's source and options, the target, and every tool that turns one into the other."""
    return joined_digest(spec.digest, target.arch, toolchain_digest(target.is_emulated))


def ir_key(spec: KernelSpec) -> str:
    """Hex hash of all that a kernel's IR depends on; it is the same for every target."""
    return joined_digest(spec.digest, "ir", front_end_digest())


def joined_digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def tools_digest(tools: Sequence[str], sources: Sequence[str]) -> str:
    """Hash of the versions of Python and of distributions, and of modules of this package."""
    digest = hashlib.sha256(platform.python_version().encode())
    versions = uninterrupted.call(lambda: [version_of(tool) for tool in tools])  # which imports
    for tool, version in zip(tools, versions, strict=True):
        digest.update(f"{tool} {version}\n".encode())
    package = Path(__file__).parent.parent
    for source in sources:
        with open(f"{package}/{source}", "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()


def version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def toolkit_version() -> str:
    """The CUDA version of what makes cubins, as "13.0"; "" where it is not installed."""
    version = version_of("nvidia-nvjitlink")
    return "" if version == "absent" else ".".join(version.split(".")[:2])


@lru_cache(maxsize=1)
def front_end_digest() -> str:
    """What turns a kernel into IR."""
    return tools_digest(["numba", "numba-cuda", "llvmlite"], front_end_sources)


@lru_cache(maxsize=2)
def toolchain_digest(emulated: bool) -> str:
    """What turns a kernel into machine code; that for the emulated device depends on the CPU."""
    tools = [] if emulated else ["nvidia-nvvm", "nvidia-nvjitlink", "nvidia-cuda-nvrtc", "cuda-core"]
    sources = back_end_sources if emulated else (*back_end_sources, "compiler/foreign.py")
    back_end = tools_digest(tools, sources)
    return joined_digest(front_end_digest(), back_end, host_cpu() if emulated else "")


def host_cpu() -> str:
    """What tells apart the CPUs that LLVM generates different code for."""
    keys = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU implementer", "CPU part", "Features")
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(line for line in first.splitlines() if line.split("\t")[0].rstrip(":") in keys)


# ---- kernels ----


class KernelCache(CacheFolder):
    """Compiled kernels in one folder. A folder that cannot be used is reported once and then does without.

    ``folder`` defaults to `cache_folder`; ``max_bytes`` bounds the sum of the entries' sizes: the least recently used
    are removed.
    """

    name = "kernel cache"
    suffix = ".kernel"
    magic = b"OCPK\x01\n"
    consequence = "Each process compiles its kernels again"
    remedy = "compiling again"
    max_entry_bytes = max_entry_bytes

    def __init__(self, folder: Path | None = None, max_bytes: int = max_cache_bytes) -> None:
        super().__init__(cache_folder() if folder is None else folder, max_bytes)

    def load(self, key: str, target: Target) -> KernelImage | None:
        """The kernel, or None where there is none or its entry is damaged."""
        return decode(self.read(key) or b"", target)

    def store(self, key: str, image: KernelImage) -> None:
        """Keeps a kernel."""
        self.write(key, encode(image))

    def load_ir(self, key: str) -> list[str] | None:
        """The texts of an IR, or None where there are none or their entry is damaged."""
        return decode_texts(self.read(key) or b"")

    def store_ir(self, key: str, texts: Sequence[str]) -> None:
        """Keeps the texts of an IR."""
        self.write(key, encode_texts(texts))


# ---- the bodies of entries; that of a kernel: three lengths, JSON, image, PTX ----


def encode(image: KernelImage) -> bytes:
    header = json.dumps({"entry": image.entry, "metadata": dict(image.metadata)}).encode()
    return struct.pack("<III", len(header), len(image.data), len(image.ptx)) + header + image.data + image.ptx


def decode(body: bytes, target: Target) -> KernelImage | None:
    """None where the bytes are no image."""
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
    """None where the bytes are no texts, or more than an entry may have."""
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(body, max_entry_bytes)
        texts = json.loads(data) if unpacker.eof else None
        if not isinstance(texts, list) or len(texts) < 2:
            return None
        "".join(texts).encode()  # LLVM wants UTF-8
    except (zlib.error, ValueError, TypeError, RecursionError):
        return None
    return texts
