"""Runs PTX on the emulated device with NumPy arrays, so that CUDA kernels can be tested on a machine without a GPU.

::

    from ort_cuda_plugin import emulator
    module = emulator.load(ptx_text)          # of nvcc, NVRTC, Triton, Numba, ...; any .target up to sm_90
    module.launch("add", grid=4, block=256, args=(a, b, out, 1000))

Arrays are copied to the device before a launch and back after it. Each access to memory is checked:
out-of-bounds accesses, reads of memory that nothing has written, and divergent barriers raise `EmulatorError`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .abi.device import CudaError, Device, DeviceArray, Dim3, Module
from .abi.emulation import clear_findings, configuration, configure, findings
from .compiler.library.isolation import import_compiler
from .compiler.targets import Target

Argument: TypeAlias = "npt.NDArray[Any] | np.generic | int | float"


class EmulatorError(RuntimeError):
    """PTX that the emulated device cannot run, or a launch that failed. ``findings`` are those of the checking mode."""

    def __init__(self, message: str, findings: Sequence[str] = ()) -> None:
        super().__init__("\n".join([message, *findings]))
        self.findings = tuple(findings)


def load(ptx: str | bytes | Path, *, check: bool = True) -> PtxModule:
    """Parse a module of PTX: its text, or the path of a file.

    Without ``check`` accesses to memory are not checked, which is faster. Raises EmulatorError for text that is not
    PTX, and OSError for a file that cannot be read.
    """
    text = ptx.read_text() if isinstance(ptx, Path) else ptx.decode() if isinstance(ptx, bytes) else ptx
    return PtxModule(text.rstrip("\0"), check)


class PtxModule:
    """A module of PTX. Kernels are compiled for the host when they are first launched."""

    def __init__(self, text: str, check: bool) -> None:
        self._target = Target.emulated(check=check)
        self._compiler = import_compiler()
        self._loaded: dict[str, Module] = {}
        try:
            self._module = self._compiler.parse(text)
        except self._compiler.PtxError as error:
            raise EmulatorError(str(error)) from error
        self.kernels = tuple(name for name, function in self._module.functions.items() if function.is_entry)
        """The names of the kernels."""
        self._device = Device.emulated()

    def launch(self, kernel: str, grid: Dim3, block: Dim3, args: Sequence[Argument], shared: int = 0) -> None:
        """Launch a kernel and wait for it.

        Args:
            kernel: its name; ``kernels`` has all.
            grid: blocks, one to three numbers.
            block: threads of a block, one to three numbers, at most 1024 together.
            args: for each parameter an array (C-contiguous; a writable one has the device's contents afterwards), a
                NumPy scalar of the parameter's size, or a Python number.
            shared: bytes of dynamic shared memory.

        Raises:
            EmulatorError: an instruction is not supported, the launch failed, or the checking mode found a fault.
            TypeError: an argument does not fit its parameter.
        """
        module = self._kernel(kernel)
        parameters = self._module.functions[kernel].parameters
        if len(args) != len(parameters):
            raise TypeError(f"{kernel}: got {len(args)} arguments, expected {len(parameters)}")
        with _checking(self._target.check):
            self._launch(module, kernel, grid, block, list(zip(args, parameters, strict=True)), shared)

    def _launch(
        self, module: Module, kernel: str, grid: Dim3, block: Dim3, pairs: list[tuple[Argument, Any]], shared: int
    ) -> None:
        values = [_device_value(self._device, kernel, index, *pair) for index, pair in enumerate(pairs)]
        clear_findings()
        try:
            module.launch(kernel, grid, block, values, shared)
            self._device.synchronize()
        except CudaError as error:
            raise EmulatorError(f"{kernel}: {error}", _taken_findings()) from error
        if found := _taken_findings():
            raise EmulatorError(f"{kernel}: the checking mode found faults", found)
        for (given, _), value in zip(pairs, values, strict=True):
            if isinstance(given, np.ndarray) and isinstance(value, DeviceArray) and given.flags.writeable:
                given[...] = self._device.download(value)

    def _kernel(self, name: str) -> Module:
        if name not in self.kernels:
            raise EmulatorError(f"{name}: the module has no such kernel; it has {', '.join(self.kernels) or 'none'}")
        if name not in self._loaded:
            try:
                image = self._compiler.compile_ptx_kernel(self._module, name, self._target)
            except self._compiler.PtxError as error:
                raise EmulatorError(str(error)) from error
            self._loaded[name] = self._device.load(image.data)
        return self._loaded[name]


def _device_value(device: Device, kernel: str, index: int, given: Argument, parameter: Any) -> DeviceArray | np.generic:
    """Return an argument in the form of a launch."""
    label = f"{kernel}: argument {index}"
    if isinstance(given, np.ndarray):
        if parameter.size != 8:
            raise TypeError(f"{label}: got an array, expected a number of {parameter.size} bytes (.{parameter.type})")
        if not given.flags.c_contiguous:
            raise TypeError(f"{label}: the array is not contiguous in C order; pass a copy")
        return device.upload(given)
    if isinstance(given, np.generic):
        if given.nbytes != parameter.size:
            raise TypeError(f"{label}: got {given.dtype} of {given.nbytes} bytes, expected {parameter.size} bytes")
        return given
    if isinstance(given, float) or parameter.type[0] == "f":
        if parameter.size not in (4, 8):
            raise TypeError(f"{label}: got a float, expected a NumPy scalar of {parameter.size} bytes")
        number: np.generic = np.dtype(f"f{parameter.size}").type(given)
        return number
    if not isinstance(given, int):
        raise TypeError(f"{label}: got {type(given).__name__}, expected a NumPy array or a number")
    bits = 8 * parameter.size
    if not -(1 << bits - 1) <= given < 1 << bits:
        raise TypeError(f"{label}: {given} does not fit {parameter.size} bytes")
    integer: np.generic = np.dtype(f"u{parameter.size}").type(given % (1 << bits))
    return integer


@contextmanager
def _checking(check: bool) -> Iterator[None]:
    """Turn the checking mode of the emulated devices on or off, and afterwards back to what sessions use."""
    before = configuration().check
    _set_checking(check)
    try:
        yield
    finally:
        _set_checking(before)


def _set_checking(check: int) -> None:
    config = configuration()
    if config.check == check:
        return
    config.check = int(check)
    try:
        configure(config)
    except ValueError as error:
        raise EmulatorError(f"the checking mode cannot change: {error}") from error


def _taken_findings() -> list[str]:
    """Return the findings of a launch and forget them, with the error that makes the device unusable."""
    found = findings()
    clear_findings()
    return found
