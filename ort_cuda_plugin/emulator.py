"""Runs PTX on the emulated device with NumPy arrays, so that CUDA kernels can be tested on a machine without a GPU.

::

    from ort_cuda_plugin import emulator
    module = emulator.load(ptx_text)          # of nvcc, NVRTC, Triton, Numba, ...; any .target up to sm_90
    module.launch("add", grid=4, block=256, args=(a, b, out, 1000))

Arrays are copied to the device before a launch and back after it. Unless `load` gets ``check=False``, the launch is
checked: out-of-bounds and misaligned accesses, races, reads of memory that nothing has written, divergent barriers and
invalid masks raise `EmulatorError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .abi.device import CudaError, Device, DeviceArray, Dim3, Module
from .abi.emulation import clear_findings, configuration, configure, findings
from .abi.errors import Error
from .compiler.library.isolation import import_compiler
from .compiler.library.ptx_image import ImageError, ptx_text
from .compiler.ptx.linking import declared_resources, link, with_shared_variables
from .compiler.targets import Target

Argument: TypeAlias = "npt.NDArray[Any] | np.generic | int | float | bytes | tuple[npt.NDArray[Any] | np.generic, ...]"
Upload: TypeAlias = Callable[["npt.NDArray[Any]"], DeviceArray]


class EmulatorError(Error, RuntimeError):
    """PTX that the emulated device cannot run, or a launch that failed. ``findings`` are those of the checking mode."""

    def __init__(self, message: str, findings: Sequence[str] = ()) -> None:
        super().__init__("\n".join([message, *findings]))
        self.findings = tuple(findings)


Source: TypeAlias = "str | bytes | Path"


def load(ptx: Source | Sequence[Source], *, check: bool = True) -> PtxModule:
    """Parse a module of PTX: its text, a fatbin's bytes, or the path of a file with either; or link several modules.

    Without ``check`` accesses to memory are not checked, which is faster. Raises EmulatorError for text that is not
    PTX, and OSError for a file that cannot be read.
    """
    sources = [ptx] if isinstance(ptx, str | bytes | Path) else list(ptx)
    if not sources:
        raise EmulatorError("ptx: got an empty sequence, expected one or more PTX modules")
    try:
        return PtxModule([_text_of(source) for source in sources], check)
    except ImageError as error:
        raise EmulatorError(str(error)) from error


def _text_of(source: Source) -> str:
    data = source.read_bytes() if isinstance(source, Path) else source
    return ptx_text(data.encode() if isinstance(data, str) else data)


@dataclass(frozen=True)
class Resources:
    """What a kernel declares. ptxas, which allocates a GPU's registers, is not modeled.

    Attributes:
        registers: virtual registers that the kernel itself declares, in words of 4 bytes; predicates do not count.
        shared_bytes: bytes of shared memory that the module declares for each block.
        local_bytes: bytes of local memory that the kernel itself declares for each thread.
    """

    registers: int
    shared_bytes: int
    local_bytes: int


class PtxModule:
    """A module of PTX. Kernels are compiled for the host when they are first launched.

    Kernels that use the same variables in global memory are compiled together, so that they share the variables.
    """

    def __init__(self, texts: Sequence[str], check: bool) -> None:
        self._target = Target.emulated(check=check)
        self._compiler = import_compiler()
        self._loaded: dict[str, Module] = {}
        try:
            self._module = link([self._compiler.parse(text) for text in texts])
        except self._compiler.PtxError as error:
            raise EmulatorError(str(error)) from error
        self.kernels = tuple(name for name, function in self._module.functions.items() if function.is_entry)
        """The names of the kernels."""
        self._device = Device.emulated()

    def parameters(self, kernel: str) -> list[str]:
        """Return the type and the name of each parameter of a kernel, such as ``.f32 factor``. Raises EmulatorError."""
        self._require(kernel)
        return [
            f".{each.type} {each.name}" + (f"[{each.count}]" if each.count > 1 else "")
            for each in self._module.functions[kernel].arguments
        ]

    def resources(self, kernel: str) -> Resources:
        """Return the registers, shared memory and local memory that a kernel declares. Raises EmulatorError."""
        self._require(kernel)
        return Resources(*declared_resources(self._module, kernel))

    def launch(self, kernel: str, grid: Dim3, block: Dim3, args: Sequence[Argument], shared: int = 0) -> None:
        """Launch a kernel and wait for it.

        Args:
            kernel: the name of the kernel; ``kernels`` has all names.
            grid: blocks, one to three numbers.
            block: threads of a block, one to three numbers whose product is at most 1024.
            args: for each parameter an array (C-contiguous; a writable one has the device's contents afterwards), a
                NumPy scalar of the parameter's size, or a Python number. A structure is its bytes, or a tuple of its
                members: arrays for pointers, NumPy scalars for numbers.
            shared: bytes of dynamic shared memory.

        Raises:
            EmulatorError: an instruction is not supported, the launch failed, or the checking mode found a fault.
            TypeError: an argument does not fit its parameter.
        """
        module = self._kernel(kernel)
        parameters = self._module.functions[kernel].arguments
        if len(args) != len(parameters):
            raise TypeError(f"{kernel}: got {len(args)} arguments, expected {len(parameters)}")
        with _checking(self._target.check):
            self._launch(module, kernel, grid, block, list(zip(args, parameters, strict=True)), shared)

    def _launch(
        self, module: Module, kernel: str, grid: Dim3, block: Dim3, pairs: list[tuple[Argument, Any]], shared: int
    ) -> None:
        uploaded: list[tuple[npt.NDArray[Any], DeviceArray]] = []

        def upload(array: npt.NDArray[Any]) -> DeviceArray:
            uploaded.append((array, self._device.upload(array)))
            return uploaded[-1][1]

        values = [
            value
            for index, pair in enumerate(pairs)
            for value in _device_values(upload, f"{kernel}: argument {index}", *pair)
        ]
        clear_findings()
        try:
            module.launch(kernel, grid, block, values, shared)
            self._device.synchronize()
        except CudaError as error:
            raise EmulatorError(f"{kernel}: {error}", _taken_findings()) from error
        if found := _taken_findings():
            raise EmulatorError(f"{kernel}: the checking mode found faults", found)
        for given, value in uploaded:
            if given.flags.writeable:
                given[...] = self._device.download(value)

    def _require(self, name: str) -> None:
        if name not in self.kernels:
            raise EmulatorError(
                f"{name}: the module has no kernel of this name. Kernels of the module: "
                f"{', '.join(self.kernels) or 'none'}"
            )

    def _kernel(self, name: str) -> Module:
        self._require(name)
        if name not in self._loaded:
            part = with_shared_variables(self._module, name)
            try:
                image = self._compiler.compile_ptx_module(part, self._target)
            except self._compiler.PtxError as error:
                raise EmulatorError(str(error)) from error
            kernels = [each for each, function in part.functions.items() if function.is_entry]
            self._loaded |= dict.fromkeys(kernels, self._device.load(image))
        return self._loaded[name]


def _device_values(upload: Upload, label: str, given: Argument, parameter: Any) -> list[DeviceArray | np.generic]:
    """Return an argument as the values that `Module.launch` takes: several words for a structure, else one value."""
    if parameter.count > 1 or parameter.size > 8:
        return list(_words(_bytes_of(upload, label, given, parameter.size)))
    return [_device_value(upload, label, given, parameter)]


def _words(data: bytes) -> Iterator[np.generic]:
    """Yield a structure's bytes as words of 8, 4, 2 and 1 bytes, as the PTX parser splits parameters."""
    while data:
        size = next(each for each in (8, 4, 2, 1) if each <= len(data))
        word: np.generic = np.frombuffer(data[:size], f"u{size}")[0]
        yield word
        data = data[size:]


def _bytes_of(upload: Upload, label: str, given: Argument, size: int) -> bytes:
    """Return the bytes of a structure: members follow each other with the alignment that C gives them."""
    if isinstance(given, bytes):
        data = given
    elif isinstance(given, np.generic):
        data = given.tobytes()
    elif isinstance(given, tuple):
        data, largest = b"", 1
        for member in given:
            if isinstance(member, np.ndarray):
                part = int(upload(member).address).to_bytes(8, "little")
            elif isinstance(member, np.generic):
                part = member.tobytes()
            else:
                raise TypeError(
                    f"{label}: a member of the structure has type {type(member).__name__}, expected an array or a "
                    "NumPy scalar"
                )
            data += bytes(-len(data) % len(part)) + part
            largest = max(largest, len(part))
        data += bytes(-len(data) % largest)
    else:
        raise TypeError(
            f"{label}: got {type(given).__name__}, expected a structure of {size} bytes: its bytes, or a tuple of its "
            "members"
        )
    if len(data) != size:
        raise TypeError(f"{label}: got a structure of {len(data)} bytes, expected {size} bytes")
    return data


def _device_value(upload: Upload, label: str, given: Argument, parameter: Any) -> DeviceArray | np.generic:
    """Return an argument of up to 8 bytes as a value that `Module.launch` takes."""
    if isinstance(given, np.ndarray):
        if parameter.size != 8:
            raise TypeError(f"{label}: got an array, expected a number of {parameter.size} bytes (.{parameter.type})")
        if not given.flags.c_contiguous:
            raise TypeError(
                f"{label}: the array is not C-contiguous. Pass a contiguous copy, which receives the results"
            )
        return upload(given)
    if isinstance(given, np.generic):
        if given.nbytes != parameter.size:
            raise TypeError(f"{label}: got {given.dtype} of {given.nbytes} bytes, expected {parameter.size} bytes")
        return given
    if isinstance(given, float) or parameter.type[0] == "f":
        if parameter.size not in (4, 8):
            raise TypeError(f"{label}: got {type(given).__name__}, expected a NumPy scalar of {parameter.size} bytes")
        number: np.generic = np.dtype(f"f{parameter.size}").type(given)
        return number
    if not isinstance(given, int):
        raise TypeError(f"{label}: got {type(given).__name__}, expected a NumPy array or a number")
    bits = 8 * parameter.size
    if not -(1 << bits - 1) <= given < 1 << bits:
        raise TypeError(
            f"{label}: got {given}, expected an integer of {parameter.size} bytes: {-(1 << bits - 1)} to "
            f"{(1 << bits) - 1}"
        )
    integer: np.generic = np.dtype(f"u{parameter.size}").type(given % (1 << bits))
    return integer


@contextmanager
def _checking(check: bool) -> Iterator[None]:
    """Set the checking mode of the emulated devices within a ``with`` block, then restore it: sessions use it too."""
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
        raise EmulatorError(f"the emulated device's checking mode cannot be turned on or off: {error}") from error


def _taken_findings() -> list[str]:
    """Return the findings of a launch, and clear them together with the error that makes the device unusable."""
    found = findings()
    clear_findings()
    return found
