"""A CUDA device, real or emulated, from Python: the driver table with exceptions and NumPy arrays.

For tests and tools; a session's Runs do not use it. Every call makes the device's context current until it returns, so
a `Device` may be used from any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from .core import core, driver_error_text, ffi
from .errors import Error

Dim3: TypeAlias = int | Sequence[int]


class CudaError(Error, RuntimeError):
    """A driver call failed. ``call`` is the member of the driver table, ``code`` the CUresult, ``name`` its name."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call}: {text}")
        self.call = call
        self.code = code
        self.name = text.partition(" ")[0]


ignored_at_end = (CudaError, TypeError, AttributeError)
"""Errors that finalizers ignore: they occur on a lost device, or while the interpreter exits."""


class Device:
    """One device with its primary context.

    ``driver`` is the driver table (cffi's ``const ocp_driver *``); `call` calls one of its members.
    """

    def __init__(self, driver: Any, ordinal: int, *, is_emulated: bool) -> None:
        self.driver = driver
        self.is_emulated = is_emulated
        self.ordinal = ordinal
        self._check("Init", driver.Init(0))
        handle = ffi.new("CUdevice *")
        self._check("DeviceGet", driver.DeviceGet(handle, ordinal))
        self.handle: int = handle[0]
        context = ffi.new("CUcontext *")
        self._check("DevicePrimaryCtxRetain", driver.DevicePrimaryCtxRetain(context, self.handle))
        self.context = context[0]

    @staticmethod
    def emulated(ordinal: int = 0) -> Device:
        """Open the emulated device of that ordinal. Raises CudaError if it does not exist."""
        return Device(core().driver_emulator(), ordinal, is_emulated=True)

    @staticmethod
    def cuda(ordinal: int = 0) -> Device:
        """Open the GPU of that ordinal. Raises RuntimeError without a CUDA driver, CudaError if the GPU does not
        exist.
        """
        why = ffi.new("const char **")
        driver = core().driver_cuda(why)
        if driver == ffi.NULL:
            raise RuntimeError(f"no CUDA driver: {ffi.string(why[0]).decode()}")
        return Device(driver, ordinal, is_emulated=False)

    def _check(self, call: str, code: int) -> None:
        if code != 0:
            raise CudaError(call, code, driver_error_text(self.driver, code))

    def enter(self) -> None:
        """Make the device's context current in the calling thread."""
        self._check("CtxSetCurrent", self.driver.CtxSetCurrent(self.context))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make the device's context current within a ``with`` block; restore the caller's context afterwards."""
        before = ffi.new("CUcontext *")
        self._check("CtxGetCurrent", self.driver.CtxGetCurrent(before))
        if before[0] == self.context:
            yield
            return
        self.enter()
        try:
            yield
        finally:
            self.driver.CtxSetCurrent(before[0])

    def call(self, member: str, *arguments: Any) -> None:
        """Call a member of the driver table with the context current. Raises CudaError."""
        with self.entered():
            self._check(member, getattr(self.driver, member)(*arguments))

    def attribute(self, attribute: int) -> int:
        value = ffi.new("int *")
        self.call("DeviceGetAttribute", value, attribute, self.handle)
        return int(value[0])

    @property
    def name(self) -> str:
        text = ffi.new("char[256]")
        self.call("DeviceGetName", text, len(text), self.handle)
        return str(ffi.string(text).decode())

    @property
    def compute_capability(self) -> tuple[int, int]:
        return self.attribute(75), self.attribute(76)

    @property
    def memory(self) -> tuple[int, int]:
        """Return free and total bytes of device memory."""
        free, total = ffi.new("size_t *"), ffi.new("size_t *")
        self.call("MemGetInfo", free, total)
        return int(free[0]), int(total[0])

    def alloc(self, nbytes: int) -> DeviceArray:
        """Allocate uninitialized memory as a vector of uint8."""
        return self.empty(nbytes, np.uint8)

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike) -> DeviceArray:
        """Allocate an uninitialized array. An array without elements still has a unique address."""
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        kind: np.dtype[Any] = np.dtype(dtype)
        address = ffi.new("CUdeviceptr *")
        self.call("MemAlloc", address, max(int(np.prod(shape, dtype=np.int64)) * kind.itemsize, 1))
        return DeviceArray(self, int(address[0]), shape, kind)

    def upload(self, values: ArrayLike, stream: Stream | None = None) -> DeviceArray:
        """Return a copy of the values on the device."""
        array = np.ascontiguousarray(values)
        out = self.empty(array.shape, array.dtype)
        out.copy_from(array, stream)
        return out

    def download(self, array: DeviceArray, stream: Stream | None = None) -> NDArray[Any]:
        """Return the array's values. The copy waits for all work that was enqueued on the stream before."""
        return array.copy_to(np.empty(array.shape, array.dtype), stream)

    def pinned(self, shape: int | Sequence[int], dtype: DTypeLike) -> PinnedArray:
        """Allocate page-locked host memory, which asynchronous copies can access."""
        return PinnedArray(self, (shape,) if isinstance(shape, int) else tuple(shape), np.dtype(dtype))

    def load(self, image: bytes) -> Module:
        """Load a compiled kernel: a cubin on a GPU, an object file on the emulated device."""
        return Module(self, image)

    def stream(self) -> Stream:
        """Create a stream that does not synchronize with the null stream."""
        return Stream(self)

    def event(self) -> Event:
        return Event(self)

    def synchronize(self) -> None:
        """Wait for all work of the device. Raises CudaError if some of it failed."""
        self.call("CtxSynchronize")


class DeviceArray:
    """A contiguous array in device memory. Deletion waits for all work of the device, then frees the memory."""

    def __init__(self, device: Device, address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.device = device
        self.address = address
        self.shape = shape
        self.dtype = dtype

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "strides": None,
            "stream": None,
            "version": 3,
        }

    def copy_from(self, values: NDArray[Any], stream: Stream | None = None) -> None:
        """Overwrite the array with ``values`` (C-contiguous, ``nbytes`` bytes); without a stream, wait for the copy."""
        self._check_host(values)
        self.device.call("MemcpyHtoDAsync", self.address, _pointer(values), values.nbytes, handle_of(stream))
        if stream is None:
            self.device.call("StreamSynchronize", ffi.NULL)

    def copy_to(self, values: NDArray[Any], stream: Stream | None = None) -> NDArray[Any]:
        """Copy into ``values`` (C-contiguous, ``nbytes`` bytes), wait for the copy, and return ``values``."""
        self.enqueue_copy_to(values, stream)
        self.device.call("StreamSynchronize", handle_of(stream))
        return values

    def enqueue_copy_to(self, values: NDArray[Any], stream: Stream | None = None) -> None:
        """Copy into ``values``; does not wait for the copy if ``values`` is in page-locked memory."""
        self._check_host(values)
        self.device.call("MemcpyDtoHAsync", _pointer(values), self.address, values.nbytes, handle_of(stream))

    def fill(self, byte: int, stream: Stream | None = None) -> None:
        self.device.call("MemsetD8Async", self.address, byte, self.nbytes, handle_of(stream))

    def _check_host(self, values: NDArray[Any]) -> None:
        if not values.flags.c_contiguous or values.nbytes != self.nbytes:
            raise ValueError(
                f"array to copy: got {values.nbytes} bytes with strides {values.strides}, expected {self.nbytes} bytes "
                "in C order"
            )

    def free(self) -> None:
        """Free the memory, after waiting for all work of the device. Safe to call twice."""
        if self.address:
            address, self.address = self.address, 0
            with self.device.entered():
                self.device.driver.CtxSynchronize()  # the code that enqueued the work reports its errors
                self.device.call("MemFree", address)

    def __del__(self) -> None:
        with suppress(*ignored_at_end):
            self.free()


class PinnedArray:
    """Page-locked host memory; ``array`` is its NumPy view, valid until `free`."""

    def __init__(self, device: Device, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.device = device
        nbytes = max(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize, 1)
        pointer = ffi.new("void **")
        device.call("MemHostAlloc", pointer, nbytes, 0)
        self._pointer = pointer[0]
        view = np.frombuffer(ffi.buffer(self._pointer, nbytes), np.uint8)
        self.array: NDArray[Any] = (
            view[: int(np.prod(shape, dtype=np.int64)) * dtype.itemsize].view(dtype).reshape(shape)
        )

    def free(self) -> None:
        if self._pointer:
            pointer, self._pointer = self._pointer, None
            self.device.call("MemFreeHost", pointer)


class Module:
    """A loaded module (cubin or object file) with one or more kernels."""

    def __init__(self, device: Device, image: bytes) -> None:
        self.device = device
        self._functions: dict[str, Any] = {}
        self.handle: Any = None
        handle = ffi.new("CUmodule *")
        device.call("ModuleLoadData", handle, ffi.from_buffer(image), len(image))
        self.handle = handle[0]

    def function(self, name: str) -> Any:
        """Return the CUfunction of that name. Raises CudaError if there is none."""
        if name not in self._functions:
            function = ffi.new("CUfunction *")
            self.device.call("ModuleGetFunction", function, self.handle, name.encode())
            self._functions[name] = function[0]
        return self._functions[name]

    def launch(
        self,
        name: str,
        grid: Dim3,
        block: Dim3,
        args: Sequence[DeviceArray | np.generic],
        shared: int = 0,
        stream: Stream | None = None,
    ) -> None:
        """Enqueue a kernel.

        ``args`` are arrays (passed as pointers) and NumPy scalars of exactly the parameters' types. Raises CudaError,
        perhaps for an earlier launch, as usual in CUDA.
        """
        values = Params(args)
        function = self.function(name)
        if shared > 48 << 10:
            self.device.call("FuncSetAttribute", function, 8, shared)
        self.device.call(
            "LaunchKernel", function, *dim3(grid), *dim3(block), shared, handle_of(stream), values.pointers, ffi.NULL
        )

    def unload(self) -> None:
        """Unload the kernels, after waiting for all work of the device. Safe to call twice."""
        if self.handle is not None:
            handle, self.handle = self.handle, None
            with self.device.entered():
                self.device.driver.CtxSynchronize()
                self.device.call("ModuleUnload", handle)

    def __del__(self) -> None:
        with suppress(*ignored_at_end):
            self.unload()


class Params:
    """Kernel parameters as the array of pointers that cuLaunchKernel takes; keeps the values alive."""

    def __init__(self, args: Sequence[DeviceArray | np.generic]) -> None:
        self._values: list[Any] = []
        for arg in args:
            if isinstance(arg, DeviceArray):
                self._values.append(ffi.new("CUdeviceptr *", arg.address))
            elif isinstance(arg, np.generic):
                self._values.append(ffi.new("char[]", arg.tobytes()))
            else:
                raise TypeError(f"kernel argument: got {type(arg).__name__}, expected a DeviceArray or a NumPy scalar")
        self.pointers = ffi.new("void *[]", [ffi.cast("void *", value) for value in self._values] or [ffi.NULL])


class Stream:
    """A CUDA stream; destroyed with this object."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.handle: Any = None
        handle = ffi.new("CUstream *")
        device.call("StreamCreate", handle, 1)
        self.handle = handle[0]

    def synchronize(self) -> None:
        self.device.call("StreamSynchronize", self.handle)

    def query(self) -> bool:
        """Whether all enqueued work is done."""
        return _is_ready(self.device, "StreamQuery", self.handle)

    def wait(self, event: Event) -> None:
        """Make later work of this stream wait for the event's most recent record."""
        self.device.call("StreamWaitEvent", self.handle, event.handle, 0)

    def destroy(self) -> None:
        if self.handle is not None:
            handle, self.handle = self.handle, None
            self.device.call("StreamDestroy", handle)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.destroy()

    def __del__(self) -> None:
        with suppress(*ignored_at_end):
            self.destroy()


class Event:
    """A CUDA event; destroyed with this object."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.handle: Any = None
        handle = ffi.new("CUevent *")
        device.call("EventCreate", handle, 0)
        self.handle = handle[0]

    def record(self, stream: Stream | None = None) -> None:
        self.device.call("EventRecord", self.handle, handle_of(stream))

    def synchronize(self) -> None:
        self.device.call("EventSynchronize", self.handle)

    def query(self) -> bool:
        """Whether all work before the event's most recent record is done."""
        return _is_ready(self.device, "EventQuery", self.handle)

    def milliseconds_since(self, start: Event) -> float:
        """Return the time from the record of ``start`` to that of this event; both events must have completed."""
        out = ffi.new("float *")
        self.device.call("EventElapsedTime", out, start.handle, self.handle)
        return float(out[0])

    def destroy(self) -> None:
        if self.handle is not None:
            handle, self.handle = self.handle, None
            self.device.call("EventDestroy", handle)

    def __del__(self) -> None:
        with suppress(*ignored_at_end):
            self.destroy()


def handle_of(stream: Stream | None) -> Any:
    """Return the CUstream of a stream, or of the null stream."""
    return ffi.NULL if stream is None else stream.handle


def dim3(value: Dim3) -> tuple[int, int, int]:
    """Return the three dimensions of a grid or block; missing ones are 1."""
    dims = (value,) if isinstance(value, int) else tuple(value)
    if not 1 <= len(dims) <= 3:
        raise ValueError(f"grid or block: got {len(dims)} dimensions, expected one to three")
    x, y, z = (*dims, 1, 1)[:3]
    return x, y, z


def _pointer(array: NDArray[Any]) -> Any:
    return ffi.cast("void *", array.ctypes.data)


def _is_ready(device: Device, member: str, handle: Any) -> bool:
    with device.entered():
        code = getattr(device.driver, member)(handle)
    if code == 600:
        return False
    device._check(member, code)
    return True
