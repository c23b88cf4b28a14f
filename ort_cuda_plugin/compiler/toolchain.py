"""The versions of the compiler's tools, which are part of the keys of the disk cache.

A process without the tools uses kernels that other processes have compiled: the cache records their tools, from which
the process derives the keys. Nothing here imports the tools.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import re
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from ort_cuda_plugin import uninterrupted
from ort_cuda_plugin.compiler.kernel import KernelSpec, digest_of
from ort_cuda_plugin.compiler.targets import Target

Tools: TypeAlias = tuple[tuple[str, str], ...]
"""(name, version) of each tool; the first one is Python."""
ABSENT = "absent"
FRONT_END = ("numba", "numba-cuda", "llvmlite")
"""Distributions that compile a kernel's source to LLVM IR, and LLVM IR to code for the emulated device."""
CUBINS = ("nvidia-nvvm", "nvidia-nvjitlink", "cuda-core")
"""Distributions that compile LLVM IR to code for GPUs."""
front_end_sources = (
    "compiler/intrinsics/__init__.py",
    "compiler/intrinsics/array_intrinsics.py",
    "compiler/intrinsics/small_floats.py",
    "compiler/front_end.py",
    "compiler/lowering.py",
    "compiler/single_assignment.py",
    "compiler/type_propagation.py",
    "compiler/intrinsics/tile_intrinsics.py",
    "compiler/intrinsics/matrix_intrinsics.py",
    "compiler/intrinsics/vector_intrinsics.py",
    "compiler/host/matrices.py",
    "compiler/compile.py",
    "compiler/kernel.py",
)
"""Modules of this package that compile a kernel's source to LLVM IR."""
back_end_sources = (
    "compiler/elf.py",
    "compiler/host/counts.py",
    "compiler/host/entry.py",
    "compiler/host/intrinsics.py",
    "compiler/host/ir.py",
    "compiler/host/math.py",
    "compiler/host/matrices.py",
    "compiler/host/stack_frame.py",
    "compiler/host/vector_math.py",
    "compiler/targets.py",
)
"""Modules of this package that compile LLVM IR to machine code."""


# ---- tools ----


@lru_cache(maxsize=64)
def version_of(distribution: str) -> str:
    try:
        # importlib.metadata imports modules, which an exception from a signal handler must not interrupt
        return uninterrupted.call(lambda: importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return ABSENT


def toolkit_version() -> str:
    """Return the CUDA version of the toolkit that generates cubins, such as "13.0"; "" if it is not installed."""
    version = version_of("nvidia-nvjitlink")
    return "" if version == ABSENT else ".".join(version.split(".")[:2])


@lru_cache(maxsize=2)
def installed_tools(emulated: bool) -> Tools:
    """Return this process's tools for the emulated device, or for GPUs; the version of a missing tool is ABSENT."""
    names = FRONT_END if emulated else (*FRONT_END, *CUBINS)
    versions = [version_of(name) for name in names]
    # Numba compiles Python bytecode, which differs between minor versions.
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return (("python", python), *zip(names, versions, strict=True))


def is_complete(tools: Tools) -> bool:
    """Return whether a process with these tools can compile, because none is missing."""
    return all(version != ABSENT for _, version in tools)


def encode_tools(tools: Tools) -> bytes:
    return json.dumps(tools).encode()


def decode_tools(data: bytes) -> Tools | None:
    """Decode the text of `encode_tools`; None if the bytes are malformed."""
    try:
        pairs = json.loads(data)
        tools = tuple((name, version) for name, version in pairs)
    except (ValueError, TypeError, RecursionError):
        return None
    return tools if all(isinstance(part, str) for pair in tools for part in pair) else None


# ---- architectures ----

OF_EVERY_TOOLKIT = ((7, 5), (8, 0), (8, 6), (8, 7), (8, 8), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1))
"""Compute capabilities that every toolkit of CUDA 13 supports."""
OF_NEWER_TOOLKITS = {(10, 7): (13, 5)}
"""Further compute capabilities, each with the first toolkit that supports it."""


def supported_capabilities(toolkit: str | None = None) -> list[tuple[int, int]]:
    """Return the compute capabilities that a toolkit (default: the installed one) supports, in ascending order."""
    version = tuple(map(int, re.findall(r"\d+", toolkit_version() if toolkit is None else toolkit)))
    return sorted((*OF_EVERY_TOOLKIT, *(each for each, since in OF_NEWER_TOOLKITS.items() if version >= since)))


def closest_capability(capability: tuple[int, int], toolkit: str | None = None) -> tuple[int, int]:
    """Return the newest supported capability up to a GPU's: the GPU runs its cubin, or the driver compiles its PTX.

    Raises ValueError for a GPU that is older than all supported ones.
    """
    older = [each for each in supported_capabilities(toolkit) if each <= capability]
    if not older:
        raise ValueError(
            f"sm_{capability[0]}{capability[1]}: CUDA 13 does not compile for this architecture. Choose another GPU, "
            "or the emulated device"
        )
    return older[-1]


# ---- keys ----


def kernel_key(spec: KernelSpec, target: Target, tools: Tools | None = None) -> str:
    """Return the key of a compiled kernel: a hash of its source and options, the target, and all tools that compile it.

    ``tools`` defaults to those of this process.
    """
    tools = installed_tools(target.is_emulated) if tools is None else tools
    own = () if target.is_emulated else tuple(map(version_of, spec.tools))
    if target.executes_ptx or (target.is_emulated and spec.tools and not spec.source):
        own = (*map(version_of, (*spec.tools, *CUBINS)), sources_digest(ptx_sources()))
    return joined_digest(spec.digest, target.arch, *own, toolchain_digest(tools, target.is_emulated))


@lru_cache(maxsize=1)
def ptx_sources() -> tuple[str, ...]:
    """Return the modules of this package that translate PTX."""
    return tuple(f"compiler/ptx/{path.name}" for path in sorted((Path(__file__).parent / "ptx").glob("*.py")))


def ir_key(spec: KernelSpec) -> str:
    """Return the key of a kernel's LLVM IR: a hash of everything that the IR depends on.

    All targets share the IR, and so do kernels that differ in their names only.
    """
    contents = digest_of(*spec.contents)
    return joined_digest(contents, "ir", _digest(installed_tools(True)), sources_digest(front_end_sources))


def joined_digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@lru_cache(maxsize=64)
def toolchain_digest(tools: Tools, emulated: bool) -> str:
    """Return a hash of the tools and modules that compile a kernel; for the emulated device, also of the host CPU."""
    back_end = back_end_sources if emulated else (*back_end_sources, "compiler/foreign.py")
    sources = (sources_digest(front_end_sources), sources_digest(back_end))
    return joined_digest(_digest(tools), *sources, host_cpu() if emulated else "")


@lru_cache(maxsize=8)
def sources_digest(sources: tuple[str, ...]) -> str:
    """Return a hash of the contents of modules of this package."""
    digest = hashlib.sha256()
    package = Path(__file__).parent.parent
    for source in sources:
        with open(f"{package}/{source}", "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()


def _digest(tools: Sequence[tuple[str, str]]) -> str:
    return joined_digest(*(f"{name} {version}" for name, version in tools))


def host_cpu() -> str:
    """Return a text that identifies the host CPU: CPUs for which LLVM generates different code have different texts."""
    keys = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU implementer", "CPU part", "Features")
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(line for line in first.splitlines() if line.split("\t")[0].rstrip(":") in keys)
