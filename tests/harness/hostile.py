"""A hostile working folder: its files shadow every module that a compilation imports, and record their execution."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

ATTEMPTS = """
import sys
names = set()
sys.addaudithook(lambda event, arguments: names.add(arguments[0]) if event == "import" else None)
sys.path.append(sys.argv[1])
from ort_cuda_plugin.compiler.library import compile_worker, isolation
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.compiler.targets import Target
compiler = isolation.import_compiler()
spec = KernelSpec("zero", ("*f32",), "def kernel(x):\\n    x[0] = float32(0)\\n")
for target in (Target.emulated(), Target.cuda(9, 0)):
    compiler.compile_kernel(spec, target)
print(*{name.split(".")[0] for name in [*names, *sys.modules]})
"""


@functools.cache
def compiler_imports() -> frozenset[str]:
    """Return the top-level modules that a process imports, or tries to import, to compile a kernel for both kinds of
    devices. Python itself tries to import sitecustomize and usercustomize when it starts.
    """
    command = [sys.executable, "-c", ATTEMPTS, str(ROOT)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return frozenset(output.split()) | {"sitecustomize", "usercustomize", "ort_cuda_plugin"}


class HostileFolder:
    """Creates ``folder`` with a module for each of `compiler_imports`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.record = folder / "record.txt"
        for name in compiler_imports():
            self.add(folder / f"{name}.py")

    def add(self, path: Path, prefix: str = "") -> None:
        """Add a file that records its name when Python executes it; ``prefix`` comes before the Python statement."""
        path.parent.mkdir(parents=True, exist_ok=True)
        statement = f"import os; os.write(os.open({str(self.record)!r}, 1089, 384), b{path.name + os.linesep!r})\n"
        path.write_text(prefix + statement)

    def ran(self) -> list[str]:
        """Return the names of the executed files, in order of execution."""
        return self.record.read_text().split() if self.record.exists() else []
