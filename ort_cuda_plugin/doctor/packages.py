"""Findings about installed packages: ONNX Runtime's wheels, which overwrite each other, and the compiler's."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from ..abi.tables import OLDEST_API
from .findings import DISTRIBUTION, Finding, Machine, note, ok, pip, problem, warning

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
COMPILER = ("numba", "numba-cuda", "llvmlite", "cuda-core", "nvidia-nvvm", "nvidia-nvjitlink")
FOR_GPU = {"cuda-core", "nvidia-nvvm", "nvidia-nvjitlink"}
"""Packages of `COMPILER` that only kernels for a GPU need."""


def runtime_findings(machine: Machine, imported_version: str, why: str) -> Iterator[Finding]:
    """Examine ONNX Runtime. ``imported_version`` is the module's; ``why``: why it cannot be imported, or ""."""
    found = [name for name in RUNTIMES if name in machine.packages]
    named = ", ".join(f"{name} {machine.packages[name]}" for name in found)
    subject = "ONNX Runtime"
    if len(found) > 1:
        mend = [pip("uninstall", "-y", *found), pip("install", _with_runtime(machine))]
        yield problem(
            subject,
            f"{named} are installed together: they share one folder, and each has overwritten files of the others",
            f"{mend[0]}; then {mend[1]}, which installs one of them: onnxruntime is enough for the plugin"
            + _without_driver(machine),
            *mend,
        )
        return
    if why and not found:
        mend = [pip("install", _with_runtime(machine))]
        yield problem(subject, f"no wheel of it is installed; {why}", f"{mend[0]}{_without_driver(machine)}", *mend)
        return
    if why:
        mend = [pip("install", "--force-reinstall", "--no-deps", f"{found[0]}=={machine.packages[found[0]]}")]
        yield problem(subject, f"{named}: {why}", mend[0], *mend)
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
        mend = [pip("install", f"{found[0] if found else RUNTIMES[0]}>=1.{OLDEST_API}")]
        yield problem(subject, f"{imported_version or 'no version'} is too old", mend[0], *mend)
        return
    yield ok(subject, named or imported_version)
    if found and found[0] == "onnxruntime-gpu":
        yield note(
            subject,
            "onnxruntime-gpu has a CUDAExecutionProvider of its own: `ort-cuda-plugin exec` and the name "
            "CUDAExecutionProvider need the wheel onnxruntime",
            "use the plugin under its own name, CudaPluginExecutionProvider, or replace the wheel by onnxruntime",
        )


def _with_runtime(machine: Machine) -> str:
    """Return the package with the extra that brings ONNX Runtime and the compilers for this machine."""
    return f"{DISTRIBUTION}[{'cuda,libs' if machine.has_gpu_driver else 'cpu'}]"


def _with_compiler(machine: Machine, for_gpu: bool) -> str:
    """Return the package with an extra that brings the compilers, and no wheel beside another one of ONNX Runtime."""
    if any(name in machine.packages for name in RUNTIMES[1:]):
        return f"{DISTRIBUTION}[{'compiler,cubins' if for_gpu else 'compiler'}]"
    return f"{DISTRIBUTION}[{'cuda' if for_gpu else 'cpu'}]"


def _without_driver(machine: Machine) -> str:
    if machine.has_gpu_driver:
        return ""
    return ". This machine has no GPU driver, so the extra is [cpu], with the emulated device"


def compiler_findings(machine: Machine, why: str = "") -> Iterator[Finding]:
    """Examine the compiler's packages. Without them only kernels in the kernel cache or in compiled models run.

    ``why``: why the compiler of installed packages cannot be imported, or "".
    """
    missing = [name for name in COMPILER if name not in machine.packages]
    if why and set(missing) <= FOR_GPU:
        mend = pip("install", _with_compiler(machine, machine.has_gpu_driver))
        yield problem("compiler", f"its packages are installed, but cannot be imported: {why}", mend, mend)
        return
    if not missing and find_spec("numba") is not None:
        yield ok("compiler", ", ".join(f"{name} {machine.packages[name]}" for name in COMPILER))
        return
    instead = ", or use compiled models (ort-cuda-plugin compile) or a warm kernel cache"
    if missing and set(missing) <= FOR_GPU:
        text = f"{', '.join(missing)} cannot be found: kernels for a GPU cannot be compiled here"
        mend = pip("install", _with_compiler(machine, for_gpu=True))
        if machine.has_gpu_driver:
            yield warning("compiler", text, mend + instead, mend)
        else:
            yield note("compiler", text, f"{mend}, if you compile for a GPU; the emulated device does not need them")
        return
    mend = pip("install", _with_compiler(machine, machine.has_gpu_driver))
    text = f"{', '.join(missing) or 'numba'} cannot be found: kernels cannot be compiled here"
    yield warning("compiler", text, mend + instead, mend)
