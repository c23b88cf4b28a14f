"""A hostile working folder: it shadows every module that a compilation imports, and records when one is executed."""

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
    """The modules at the top that a process asks for which compiles a kernel for both kinds of devices: those that are
    there, and those that are not, such as what Python looks for when it starts."""
    command = [sys.executable, "-c", ATTEMPTS, str(ROOT)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return frozenset(output.split()) | {"sitecustomize", "usercustomize", "ort_cuda_plugin"}


class HostileFolder:
    """``folder`` with a file for each of `compiler_imports`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.record = folder / "record.txt"
        for name in compiler_imports():
            self.add(folder / f"{name}.py")

    def add(self, path: Path, prefix: str = "") -> None:
        """Add a file, Python unless it has a prefix, that records its name when it is executed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        statement = f"import os; os.write(os.open({str(self.record)!r}, 1089, 384), b{path.name + os.linesep!r})\n"
        path.write_text(prefix + statement)

    def ran(self) -> list[str]:
        """Return the executed files, in order."""
        return self.record.read_text().split() if self.record.exists() else []
