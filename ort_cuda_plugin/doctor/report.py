"""The report for an issue: all findings, versions, platform, CPU, devices and variables, without personal names."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Iterator, Sequence

from .. import __version__
from ..compiler.toolchain import host_cpu
from ..ep.device.devices import DeviceInfo, cuda_devices, emulated_devices
from .findings import DISTRIBUTION, Finding, Machine
from .redaction import identity_of
from .variables import PREFIX, VARIABLES

_PACKAGES = re.compile(
    r"(cffi|cuda|cupti|cupy|jax|llvmlite|ml|numba|numpy|nvidia|onnx\w*|ort|packaging|pip|rich|torch|triton)\b"
)
OTHER_VARIABLES = (
    "CUDA_DEVICE_ORDER",
    "CUDA_HOME",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUDA_PATH",
    "CUDA_VISIBLE_DEVICES",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "NUMBA_CPU_FEATURES",
    "NUMBA_CPU_NAME",
    "NUMBA_DISABLE_JIT",
    "NVIDIA_DRIVER_CAPABILITIES",
    "NVIDIA_VISIBLE_DEVICES",
    "PYTHONPATH",
    "XDG_CACHE_HOME",
)
"""Variables of other software that change what the plugin does. The report omits all others: they may be secret."""


def finding_lines(finding: Finding) -> Iterator[str]:
    """Yield the lines of a finding; the first begins with the severity, in eight columns."""
    yield f"{finding.severity.value:8} {finding.subject}: {finding.text}"
    if finding.advice:
        yield f"{'':8} -> {finding.advice}"


def report(machine: Machine, found: Sequence[Finding]) -> str:
    """Return the report as text. User, host, home folder and other paths of the user are replaced."""
    sections = {
        "findings": [line for finding in found for line in finding_lines(finding)],
        "versions": [f"{DISTRIBUTION} {__version__}", *_versions(machine)],
        "platform": list(_platform(machine)),
        "CPU": list(_cpu(machine)),
        "driver and devices": list(_devices(machine)),
        "variables": list(_variables(machine)) or ["none is set"],
    }
    parts = [f"## {title}\n\n" + "".join(f"{line}\n" for line in lines) for title, lines in sections.items()]
    return identity_of(machine).redacted("\n".join([f"# {DISTRIBUTION} doctor --report\n", *parts]))


def _versions(machine: Machine) -> Iterator[str]:
    yield f"{platform.python_implementation()} {platform.python_version()}"
    for name in sorted(machine.packages):
        if _PACKAGES.match(name) and name != DISTRIBUTION:
            yield f"{name} {machine.packages[name]}"


def _platform(machine: Machine) -> Iterator[str]:
    yield platform.platform()
    if name := re.search(r'^PRETTY_NAME="?([^"\n]*)', machine.text("etc/os-release"), flags=re.M):
        yield name[1]
    yield f"architecture {machine.architecture}, {'in a container' if machine.is_container else 'not in a container'}"
    if memory := re.search(r"^MemTotal:\s*(\d+) kB", machine.text("proc/meminfo"), flags=re.M):
        yield f"memory {int(memory[1]) / 2**20:.1f} GiB"


def _cpu(machine: Machine) -> Iterator[str]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield f"{os.cpu_count()} CPUs, {usable} of them usable by this process"
    if name := re.search(r"^model name\s*: (.*)", machine.text("proc/cpuinfo"), flags=re.M):
        yield name[1]
    yield from host_cpu().splitlines()


def _devices(machine: Machine) -> Iterator[str]:
    yield from machine.text("proc/driver/nvidia/version").splitlines()
    sources: dict[str, Callable[[], list[DeviceInfo]]] = {
        "GPU": lambda: cuda_devices()[0],
        "emulated device": emulated_devices,
    }
    for kind, list_devices in sources.items():
        try:
            devices = list_devices()
        except (RuntimeError, ImportError, OSError, ValueError) as error:
            yield f"{kind}: {type(error).__name__}: {error}"
            continue
        for device in devices:
            major, minor = device.compute_capability
            yield (
                f"{kind} {device.ordinal}: {device.name}, compute capability {major}.{minor}, driver CUDA "
                f"{device.driver_version}, {device.multiprocessors} multiprocessors, "
                f"{device.memory_bytes / 2**30:.1f} GiB, {device.max_shared_bytes} bytes of shared memory per block"
            )
        if not devices:
            yield f"{kind}: none"


def _variables(machine: Machine) -> Iterator[str]:
    """Yield known variables with their values. The value of an unknown variable may be anything, so it is left out."""
    for name in sorted(machine.environment):
        if name in VARIABLES or name in OTHER_VARIABLES:
            yield f"{name}={machine.environment[name]!r}"
        elif name.upper().startswith(PREFIX):
            yield f"{name}: the plugin does not read it"
