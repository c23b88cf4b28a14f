"""The disk cache of compiled kernels and of their IR, shared by all processes of a user.

An entry's file name is a hash of all that its contents depend on. The folder has mode 0700 and belongs to the user,
because what it holds is executed. Nothing here imports Numba or llvmlite.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import stat
import struct
import tempfile
import time
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from ort_cuda_plugin.runtime.kernel import KernelSpec
from ort_cuda_plugin.runtime.targets import KernelImage, Target

logger = logging.getLogger("ort_cuda_plugin")

CACHE_DIR_VARIABLE = "ORT_CUDA_PLUGIN_CACHE_DIR"
max_cache_bytes = 512 << 20
entry_magic = b"OCPK\x01\n"
entry_suffix = ".kernel"
touch_after_seconds = 3600.0
front_end_sources = ("kernels/intrinsics.py", "kernels/small_floats.py", "runtime/compile.py", "runtime/kernel.py")
"""The modules of this package that make IR of a kernel's source."""
back_end_sources = (
    "runtime/elf.py",
    "runtime/host_entry.py",
    "runtime/host_intrinsics.py",
    "runtime/host_ir.py",
    "runtime/host_math.py",
    "runtime/host_vector_math.py",
    "runtime/targets.py",
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
    for tool in tools:
        try:
            digest.update(f"{tool} {importlib.metadata.version(tool)}\n".encode())
        except importlib.metadata.PackageNotFoundError:
            digest.update(f"{tool} absent\n".encode())
    for source in sources:
        digest.update((Path(__file__).parent.parent / source).read_bytes())
    return digest.hexdigest()


@lru_cache(maxsize=1)
def front_end_digest() -> str:
    """What turns a kernel into IR."""
    return tools_digest(["numba", "numba-cuda", "llvmlite"], front_end_sources)


@lru_cache(maxsize=2)
def toolchain_digest(emulated: bool) -> str:
    """What turns a kernel into machine code; that for the emulated device depends on the CPU."""
    tools = [] if emulated else ["nvidia-nvvm", "nvidia-nvjitlink", "cuda-core"]
    back_end = tools_digest(tools, back_end_sources)
    return joined_digest(front_end_digest(), back_end, host_cpu() if emulated else "")


def host_cpu() -> str:
    """What tells apart the CPUs that LLVM generates different code for."""
    keys = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU implementer", "CPU part", "Features")
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(line for line in first.splitlines() if line.split("\t")[0].rstrip(":") in keys)


# ---- folder ----


def cache_folder() -> Path:
    """Where entries lie: $ORT_CUDA_PLUGIN_CACHE_DIR, or ort-cuda-plugin under the user's cache folder.

    It begins with "~" for a user without a home folder, as containers have them.
    """
    if configured := os.environ.get(CACHE_DIR_VARIABLE):
        return Path(configured)
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base if base and os.path.isabs(base) else os.path.expanduser("~/.cache")) / "ort-cuda-plugin"


def folder_problem(folder: Path) -> str | None:
    """Makes the folder where it is missing; says why it cannot be used, or None."""
    if folder.parts[:1] == ("~",):
        return "this user has no home folder"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        return f"it cannot be made: {error.strerror or error}"
    if not stat.S_ISDIR(status.st_mode):
        return "it is no folder"
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}, and what it holds would be executed"
    if status.st_mode & 0o022:
        return f"other users can write to it (mode {stat.S_IMODE(status.st_mode):04o}); chmod 700 it"
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return "it is not writable"
    return None


class KernelCache:
    """Compiled kernels in one folder. A folder that cannot be used is reported once and then does without.

    ``folder`` defaults to `cache_folder`; ``max_bytes`` bounds the sum of the entries' sizes: the least recently used
    are removed.
    """

    def __init__(self, folder: Path | None = None, max_bytes: int = max_cache_bytes) -> None:
        self.folder = folder if folder is not None else cache_folder()
        self.max_bytes = max_bytes
        self.usable = True
        self.writes = 0
        if problem := folder_problem(self.folder):
            self.disable(problem)

    def disable(self, problem: str) -> None:
        if self.usable:
            logger.warning(
                "kernel cache %s is not used: %s. Each process compiles its kernels again; set %s to another folder.",
                self.folder,
                problem,
                CACHE_DIR_VARIABLE,
            )
        self.usable = False

    def path(self, key: str) -> Path:
        return self.folder / f"{key}{entry_suffix}"

    def load(self, key: str, target: Target) -> KernelImage | None:
        """The kernel, or None where there is none or its entry is damaged."""
        body = self.read(key)
        return None if body is None else decode(body, target)

    def store(self, key: str, image: KernelImage) -> None:
        """Keeps a kernel."""
        self.write(key, encode(image))

    def load_ir(self, key: str) -> list[str] | None:
        """The texts of an IR, or None where there are none or their entry is damaged."""
        body = self.read(key)
        return None if body is None else [str(text) for text in json.loads(zlib.decompress(body))]

    def store_ir(self, key: str, texts: Sequence[str]) -> None:
        """Keeps the texts of an IR."""
        self.write(key, zlib.compress(json.dumps(list(texts)).encode(), 1))

    def read(self, key: str) -> bytes | None:
        """What an entry holds, or None where there is none or it is damaged."""
        if not self.usable:
            return None
        path = self.path(key)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        start = len(entry_magic) + 32
        if not data.startswith(entry_magic) or hashlib.sha256(data[start:]).digest() != data[len(entry_magic) : start]:
            logger.info("kernel cache entry %s is damaged; compiling again", path)
            return None
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > touch_after_seconds:
                os.utime(path)
        return data[start:]

    def write(self, key: str, body: bytes) -> None:
        """Writes an entry atomically: a reader sees all of it or nothing."""
        if not self.usable:
            return
        try:
            descriptor, temporary = tempfile.mkstemp(dir=self.folder, suffix=".part")
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(entry_magic + hashlib.sha256(body).digest() + body)
                os.replace(temporary, self.path(key))
            except BaseException:
                os.unlink(temporary)
                raise
        except OSError as error:
            self.disable(f"writing failed: {error.strerror or error}")
            return
        if self.writes % 64 == 0:
            self.trim()
        self.writes += 1

    def trim(self) -> None:
        """Removes the least recently used entries until a tenth of the bound is free, and abandoned partial files."""
        entries = []
        for found in os.scandir(self.folder):
            with contextlib.suppress(OSError):
                status = found.stat()
                if found.name.endswith(".part") and time.time() - status.st_mtime > touch_after_seconds:
                    os.unlink(found.path)
                elif found.name.endswith(entry_suffix):
                    entries.append((status.st_mtime, status.st_size, found.path))
        total = sum(size for _, size, _ in entries)
        if total <= self.max_bytes:
            return
        for _, size, path in sorted(entries):
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= size
            if total <= self.max_bytes * 9 // 10:
                return


# ---- entries: magic, SHA-256 of the rest; of a kernel then three lengths, JSON, image, PTX ----


def encode(image: KernelImage) -> bytes:
    header = json.dumps({"entry": image.entry, "metadata": dict(image.metadata)}).encode()
    return struct.pack("<III", len(header), len(image.data), len(image.ptx)) + header + image.data + image.ptx


def decode(body: bytes, target: Target) -> KernelImage:
    header_bytes, image_bytes, ptx_bytes = struct.unpack_from("<III", body)
    image_start = 12 + header_bytes
    ptx_start = image_start + image_bytes
    header = json.loads(body[12:image_start])
    return KernelImage(
        body[image_start:ptx_start],
        header["entry"],
        target,
        header["metadata"],
        body[ptx_start : ptx_start + ptx_bytes],
    )
