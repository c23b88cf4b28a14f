"""Reads a kernel's machine code: registers, shared memory, instructions, and overlapping loads.

Registers and shared memory come from the cubin, the rest from nvdisasm (pip package nvidia-cuda-nvdisasm). Without
nvdisasm `Code.mix` is empty, and accesses count with their widths in the LLVM IR.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..compiler.caches.disassembly_cache import disassembly_cache
from ..compiler.kernel import KernelSpec
from ..compiler.library.kernel_library import KernelLibrary
from ..compiler.nvidia_packages import nvidia_files
from ..compiler.targets import KernelImage, Target
from ..progress.events import Task

_instruction = re.compile(
    r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(?P<name>[A-Z][A-Z0-9_]*)(?P<more>(?:\.\w+)*)\s*(?P<operands>[^;]*);",
    re.MULTILINE,
)
_register = re.compile(r"\bR(\d+)(\.64)?")
_loads = ("LDG", "LDL", "LD")
MEMORY = ("LDG", "STG", "LDS", "STS", "LDSM", "LDGSTS", "LDL", "STL")


@dataclass(frozen=True)
class Code:
    """The machine code of a kernel for one GPU.

    ``mix`` counts the instructions by name; names of memory instructions have the width, such as "LDG.128". ``rounds``
    is the number of waits per load to registers: less than 1 if several loads are in flight.
    """

    registers: int
    static_shared: int
    spilled: int
    mix: Mapping[str, int]
    rounds: float

    def widest(self, name: str) -> int:
        """Return the bytes of the widest access by an instruction such as "LDG", at least 4; 0 without nvdisasm."""
        if not self.mix:
            return 0
        return 16 if f"{name}.128" in self.mix else 8 if f"{name}.64" in self.mix else 4

    @property
    def uses_stack(self) -> bool:
        """Return whether an array of a thread is, or may be, in local memory; else all arrays are in registers."""
        return not self.mix or any(name.startswith(("LDL", "STL")) for name in self.mix)

    @property
    def uses_tensor_cores(self) -> bool:
        return any(name.startswith(("HMMA", "IMMA", "DMMA", "HGMMA", "QMMA")) for name in self.mix)


@cache
def disassembler() -> str | None:
    """Return the path of nvdisasm, None if it is not installed."""
    installed = next(nvidia_files("*/bin/nvdisasm"), None)
    return shutil.which("nvdisasm") if installed is None else str(installed)


def code_of(specs: Sequence[KernelSpec], target: Target, library: KernelLibrary | None = None) -> list[Code]:
    """Compile the kernels for a GPU and return their machine code. Raises KernelCompileError."""
    library = library or KernelLibrary(count=lambda name, by: None)
    images = library.get_many(list(specs), target)
    task = Task("reading machine code", len(images))

    def read(image: KernelImage) -> Code:
        found = _code(image)
        task.advance(image.entry)
        return found

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(read, images))


def _code(image: KernelImage) -> Code:
    text = disassembled(image)
    found = image.metadata
    return Code(
        registers=found.get("registers", 32),
        static_shared=found.get("static_shared_bytes", 0),
        spilled=found.get("spill_store_bytes", 0) + found.get("spill_load_bytes", 0),
        mix=mix_of(text),
        rounds=rounds_of(text),
    )


def disassembled(image: KernelImage) -> str:
    """Return nvdisasm's text of a cubin; "" if nvdisasm is missing or does not know the architecture."""
    tool = disassembler()
    if tool is None or not image.data.startswith(b"\x7fELF"):
        return ""
    cache = disassembly_cache()
    if (known := cache.load(image.data, Path(tool))) is not None:
        return known
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image.data)
        file.flush()
        # -ndf omits the dataflow analysis of branches, which takes a third of the time.
        command = [tool, "-c", "-ndf", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    if text:
        cache.keep(image.data, Path(tool), text)
    return text


def mix_of(text: str) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for match in _instruction.finditer(text):
        name, more = match["name"], match["more"].split(".")
        if name == "NOP":
            continue
        if name in MEMORY:
            name = ".".join([name, *(part for part in more if part in ("64", "128"))])
        counts[name] += 1
    return dict(counts)


def rounds_of(text: str) -> float:
    """Return the waits per load to registers in the machine code ``text``, in program order; 1 without loads.

    The first instruction that uses the result of a load waits for all loads in flight.
    """
    loads = 0
    waits = 0.0
    flying: set[int] = set()
    for match in _instruction.finditer(text):
        registers: list[int] = []
        for number, wide in _register.findall(match["operands"]):
            registers += [int(number), int(number) + 1] if wide else [int(number)]
        if match["name"] in _loads:
            loads += 1
            first, *addresses = registers or [0]
            if flying.intersection(addresses):
                waits += 1
                flying.clear()
            width = 4 if ".128" in match["more"] else 2 if ".64" in match["more"] else 1
            flying.update(range(first, first + width))
        elif flying.intersection(registers):
            waits += 1
            flying.clear()
    waits += bool(flying)
    return waits / loads if loads else 1.0
