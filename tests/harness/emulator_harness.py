"""Common parts of the emulated device's tests: configuration, kernels in C, new devices."""

from __future__ import annotations

import dataclasses
import gc
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import build_plugin
from kernel_objects import KERNEL_FLAGS
from ort_cuda_plugin.abi.core import ffi
from ort_cuda_plugin.abi.device import Device
from ort_cuda_plugin.abi.emulation import clear_findings, configuration, configure

SOURCES = Path(__file__).resolve().parents[1] / "c"


@dataclasses.dataclass
class Emulator:
    """Settings of the emulated devices; see csrc_shim/emulator/calls/emulator.h."""

    num_devices: int
    workers: int
    device_bytes: int
    adversarial: int
    check: int
    slow_milliseconds: int
    semaphore_seconds: int
    seed: int


def current() -> Emulator:
    config = configuration()
    return Emulator(**{field.name: getattr(config, field.name) for field in dataclasses.fields(Emulator)})


def apply(settings: Emulator) -> None:
    """Apply the settings. Raises ValueError if the library refuses them; the message has its reason."""
    configure(ffi.new("ocp_emu_config *", dataclasses.asdict(settings)))


@contextmanager
def configured(**changes: int) -> Iterator[Device]:
    """Yield emulated device 0 with changed settings and no findings. Restore settings and device after the block.

    Garbage collection is off in the block. If a test loses the device, freeing objects that other tests left in
    reference cycles would make the plugin notice the loss, and refuse the device for the rest of the process.
    """
    before, collects = current(), gc.isenabled()
    apply(dataclasses.replace(before, **changes))
    clear_findings()
    gc.disable()
    try:
        yield Device.emulated(0)
    finally:
        try:
            apply(before)  # runs deferred work, which may fail
        finally:
            clear_findings()
            if collects:
                gc.enable()


def compile_kernels(folder: Path, code_model: Sequence[str] = KERNEL_FLAGS) -> bytes:
    """Compile emulator_kernels.c to an object file. The large code model is that of the kernel compiler."""
    target = folder / "emulator_kernels.o"
    flags = ["-O2", "-fno-asynchronous-unwind-tables", *code_model]
    source = SOURCES / "emulator_kernels.c"
    include = f"-I{build_plugin.SOURCES}"
    command = [*build_plugin.compiler(), *flags, include, "-c", str(source), "-o", str(target)]
    subprocess.run(command, check=True)
    return target.read_bytes()
