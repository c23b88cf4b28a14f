"""The stream of a Run for Python code that the plan calls: launches, copies and reads in stream order."""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...abi.core import check, core, count, driver_error_text, ffi, lib, new_error
from ...compiler.kernel import KernelSpec
from ...model.ir import Array
from ...program.steps.callbacks import DeviceArray, Number
from ..device.devices import DriverError
from ..device.open_device import LoadedKernel, OpenDevice

_FORMATS = {"i32": "i", "i64": "q", "f32": "f", "f64": "d"}


class CallKernels:
    """Kernels that callbacks of a fused node launch. A kernel is compiled and loaded on first use, and stays loaded
    until `release`.
    """

    def __init__(self, device: OpenDevice) -> None:
        self._device = device
        self._held: dict[KernelSpec, LoadedKernel] = {}
        self._lock = threading.Lock()

    def get(self, spec: KernelSpec) -> LoadedKernel:
        """Return a kernel. Raises the errors of `OpenDevice.acquire_kernels`."""
        with self._lock:
            if spec not in self._held:
                (self._held[spec],) = self._device.acquire_kernels([spec])
            return self._held[spec]

    def release(self) -> None:
        """Release the kernels. None of them may be running."""
        self._device.release_kernels(list(self._held.values()))
        self._held.clear()


class RunStream:
    """The `CallStream` of one call of a callback in a Run. The device's context is current."""

    def __init__(self, device: OpenDevice, stream: Any, kernels: CallKernels) -> None:
        self._device = device
        self._stream = stream
        self._kernels = kernels
        self._handle = core().stream_handle(stream)

    @property
    def handle(self) -> int:
        """Return the Run's ``cudaStream_t`` as an integer."""
        return int(ffi.cast("uintptr_t", self._handle))

    @property
    def is_emulated(self) -> bool:
        return self._device.info.emulated

    def launch(
        self,
        spec: KernelSpec,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[DeviceArray | Number],
        shared_bytes: int = 0,
    ) -> None:
        """Implement `CallStream.launch`. A grid with a 0 launches nothing.

        Raises TypeError for arguments that contradict the kernel's signature, KernelCompileError if the kernel does not
        compile, and DriverError if the driver cannot load or launch it.
        """
        if len(args) != len(spec.signature):
            raise TypeError(f"kernel {spec.name} takes {len(spec.signature)} arguments, got {len(args)}")
        values = [_parameter(spec, number, arg) for number, arg in enumerate(args)]
        if 0 in grid:
            return
        kernel = self._kernels.get(spec)
        pointers = ffi.new("void *[]", [ffi.cast("void *", value) for value in values] or [ffi.NULL])
        sizes = (*_three(grid), *_three(block), shared_bytes)
        result = self._device.driver.LaunchKernel(kernel.function, *sizes, self._handle, pointers, ffi.NULL)
        self._check(result, "cuLaunchKernel", f"kernel {spec.name}")
        count("LAUNCHES")

    def copy(self, destination: DeviceArray, source: DeviceArray) -> None:
        """Implement `CallStream.copy`. Raises TypeError for different sizes, DriverError if the driver refuses it."""
        if destination.nbytes != source.nbytes:
            raise TypeError(
                f"cannot copy an array of {source.nbytes} bytes into an array of {destination.nbytes} bytes, expected "
                "equal sizes"
            )
        if source.nbytes and destination.address != source.address:
            sizes = (destination.address, source.address, source.nbytes)
            self._check(self._device.driver.MemcpyDtoDAsync(*sizes, self._handle), "cuMemcpyDtoDAsync", "a copy")

    def memset(self, destination: DeviceArray, byte: int) -> None:
        """Implement `CallStream.memset`. Raises DriverError if the driver refuses it."""
        if destination.nbytes:
            sizes = (destination.address, byte, destination.nbytes)
            self._check(self._device.driver.MemsetD8Async(*sizes, self._handle), "cuMemsetD8Async", "a memset")

    def read(self, array: DeviceArray) -> Array:
        """Implement `CallStream.read`. Raises DriverError if the driver refuses it, PluginError if work failed."""
        values = np.empty(array.shape, array.dtype.numpy)
        if array.nbytes:
            target = ffi.from_buffer(values.reshape(-1).view(np.uint8))
            result = self._device.driver.MemcpyDtoHAsync(target, array.address, array.nbytes, self._handle)
            self._check(result, "cuMemcpyDtoHAsync", "reading a tensor")
        self.synchronize()
        return values

    def write(self, array: DeviceArray, values: Array) -> None:
        """Implement `CallStream.write`, and wait for the copy.

        Raises TypeError for another type or shape, DriverError if the driver refuses the copy, and PluginError if work
        failed.
        """
        if values.dtype != array.dtype.numpy or values.shape != array.shape:
            wanted = f"{array.dtype.numpy}{list(array.shape)}"
            raise TypeError(f"the tensor expects an array {wanted}, got {values.dtype}{list(values.shape)}")
        if not array.nbytes:
            return
        source = ffi.from_buffer(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        result = self._device.driver.MemcpyHtoDAsync(array.address, source, array.nbytes, self._handle)
        self._check(result, "cuMemcpyHtoDAsync", "writing a tensor")
        self.synchronize()  # the caller may change the array after the call

    def synchronize(self) -> None:
        """Implement `CallStream.synchronize`. Raises PluginError if work failed."""
        error = new_error()
        core().stream_synchronize(self._stream, error)
        check(error)

    def _check(self, result: int, call: str, subject: str) -> None:
        if result != lib.CUDA_SUCCESS:
            raise DriverError(f"{call} failed for {subject}: {driver_error_text(self._device.driver, result)}")


def _three(sizes: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def _parameter(spec: KernelSpec, number: int, arg: DeviceArray | Number) -> Any:
    entry = spec.signature[number]
    if isinstance(arg, DeviceArray):
        if entry != f"*{arg.dtype.short}":
            raise TypeError(
                f"kernel {spec.name}: argument {number} is *{arg.dtype.short}, and the signature declares {entry}"
            )
        return ffi.new("CUdeviceptr *", arg.address)
    if entry.startswith("*"):
        raise TypeError(f"kernel {spec.name}: argument {number} is a number, and the signature declares {entry}")
    try:
        return ffi.new("char[]", struct.pack(_FORMATS[entry], arg))
    except struct.error as error:
        raise TypeError(f"kernel {spec.name}: argument {number} must be {entry}, got {arg!r}: {error}") from None
