"""Targets of compilation (GPU architectures, the emulated device), and compiled images."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ort_cuda_plugin.compiler.kernel import KernelSpec


@dataclass(frozen=True)
class Target:
    """A GPU architecture, or the emulated device on this host's CPU.

    With ``check``, emulated kernels call a check before each memory access (checking mode); with ``count``, they call
    counters (counting mode). Without ``contract``, operations do not fuse to FMAs, so that results can be compared bit
    by bit. An emulated target with a compute capability executes the PTX that NVVM generates for it.
    """

    kind: str
    compute_capability: tuple[int, int] = (0, 0)
    check: bool = False
    contract: bool = True
    count: bool = False

    @staticmethod
    def emulated(check: bool = False, contract: bool = True, ptx: tuple[int, int] = (0, 0)) -> Target:
        return Target("emulated", ptx, check=check, contract=contract)

    @staticmethod
    def counted() -> Target:
        """Return the target of the emulated device's counting mode."""
        return Target("emulated", count=True)

    @staticmethod
    def cuda(major: int, minor: int) -> Target:
        return Target("cuda", (major, minor))

    @property
    def is_emulated(self) -> bool:
        return self.kind == "emulated"

    @property
    def arch(self) -> str:
        """Return ``"sm_90"`` for a GPU; for the emulated device ``"emulated"``, with suffixes for its modes."""
        if self.is_emulated:
            mode = "_check" if self.check else "_count" if self.count else ""
            source = f"_ptx_{self.capability}" if self.executes_ptx else ""
            return f"emulated{mode}{'' if self.contract else '_uncontracted'}{source}"
        return self.capability

    @property
    def executes_ptx(self) -> bool:
        """Return whether the emulated device executes PTX instead of Numba's LLVM IR."""
        return self.is_emulated and self.compute_capability != (0, 0)

    @property
    def capability(self) -> str:
        major, minor = self.compute_capability
        return f"sm_{major}{minor}"


@dataclass(frozen=True)
class KernelImage:
    """One compiled kernel, ready for cuModuleLoadData.

    ``data`` is a cubin (NUL-terminated PTX for an architecture newer than the toolkit), or for the emulated device a
    relocatable ELF object as ``csrc_shim/emulator/kernel.h`` describes it; ``entry`` is the kernel's symbol in it.
    ``metadata`` has integers such as ``static_shared_bytes``. ``ptx`` is the PTX that the cubin was compiled from.
    """

    data: bytes
    entry: str
    target: Target
    metadata: Mapping[str, int] = field(default_factory=dict)
    ptx: bytes = b""


@dataclass(frozen=True)
class BuiltKernel(KernelSpec):
    """A kernel that was compiled elsewhere. It has no source; its digest identifies its image."""

    image: KernelImage = field(kw_only=True, compare=False)


usage_patterns = {
    "registers": r"\bused (\d+) registers",
    "static_shared_bytes": r"(\d+) bytes smem",
    "stack_bytes": r"(\d+) bytes stack frame",
    "spill_store_bytes": r"(\d+) bytes spill stores",
    "spill_load_bytes": r"(\d+) bytes spill loads",
}


def resource_usage(log: str) -> dict[str, int]:
    """Return a kernel's resource usage from the linker's verbose log: the maximum of each quantity over functions."""
    found = {name: [int(value) for value in re.findall(pattern, log)] for name, pattern in usage_patterns.items()}
    return {name: max(values) for name, values in found.items() if values}
