"""Findings about installed packages: ONNX Runtime's wheels, which overwrite each other, and the compiler's."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from ..abi.tables import OLDEST_API
from .findings import Finding, Machine, ok, problem, warning

RUNTIMES = (
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-directml",
    "onnxruntime-openvino",
    "onnxruntime-rocm",
    "onnxruntime-training",
    "onnxruntime-qnn",
    "ort-nightly",
    "ort-nightly-gpu",
)
"""Distributions that hold the module ``onnxruntime``."""
OLDEST = {"cffi": 2, "numpy": 2}
"""Oldest major versions with which the plugin works, of packages that it needs."""
COMPILER = ("numba", "numba-cuda", "llvmlite", "cuda-core", "nvidia-nvvm", "nvidia-nvjitlink")


def runtime_findings(machine: Machine, imported_version: str, why: str) -> Iterator[Finding]:
    """Examine ONNX Runtime. ``imported_version`` is the module's; ``why``: why it cannot be imported, or ""."""
    found = [name for name in RUNTIMES if name in machine.packages]
    named = ", ".join(f"{name} {machine.packages[name]}" for name in found)
    subject = "ONNX Runtime"
    if len(found) > 1:
        yield problem(
            subject,
            f"{named} are installed together: they share one folder, and each has overwritten files of the others",
            f"pip uninstall -y {' '.join(found)}; pip install one of them: onnxruntime is enough for the plugin",
        )
        return
    if why:
        yield problem(subject, why, "pip install --force-reinstall onnxruntime")
        return
    if found and machine.packages[found[0]] != imported_version:
        yield problem(
            subject,
            f"Python imports onnxruntime {imported_version}, but pip has installed {named}",
            "PYTHONPATH or another package contains a second onnxruntime: remove one of the two",
        )
        return
    parts = imported_version.split(".")
    version = int(parts[1]) if len(parts) > 1 and parts[0] == "1" and parts[1].isdecimal() else 0
    if version < OLDEST_API:
        yield problem(
            subject,
            f"{imported_version or 'no version'} is too old",
            f"pip install 'onnxruntime>=1.{OLDEST_API}'",
        )
        return
    yield ok(subject, named or imported_version)


def requirement_findings(machine: Machine) -> Iterator[Finding]:
    """Report packages that every process needs and that are too old."""
    for name, oldest in OLDEST.items():
        version = machine.packages.get(name, "")
        major = version.partition(".")[0]
        if major.isdecimal() and int(major) < oldest:
            yield problem(
                name,
                f"{version} is too old: the plugin needs {name} {oldest} or newer",
                f"pip install '{name}>={oldest}'",
            )


def compiler_findings(machine: Machine) -> Iterator[Finding]:
    """Examine the compiler's packages. Without them only kernels in the kernel cache or in compiled models run."""
    missing = [name for name in COMPILER if name not in machine.packages]
    if not missing and find_spec("numba") is not None:
        yield ok("compiler", ", ".join(f"{name} {machine.packages[name]}" for name in COMPILER))
        return
    for_gpu = [name for name in missing if name in ("cuda-core", "nvidia-nvvm", "nvidia-nvjitlink")]
    what = "kernels for a GPU" if missing == for_gpu else "kernels"
    yield warning(
        "compiler",
        f"{', '.join(missing) or 'numba'} cannot be found: {what} cannot be compiled here",
        "pip install 'ort-cuda-plugin[cuda]', or use compiled models (ort-cuda-plugin compile) or a warm kernel cache",
    )
