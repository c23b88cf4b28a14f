"""Files in memory that stand in for exported Vulkan memory and timeline semaphores (docs/external_resources.md)."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import time
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ort_cuda_plugin.abi.core import ffi
from ort_cuda_plugin.abi.device import CudaError, Device, Stream

MAGIC = b"ocp-time"
TIMELINE_SEMAPHORE_FD = 9  # CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_TIMELINE_SEMAPHORE_FD


class SharedFile:
    """A file in memory, mapped into this process. ``fd`` is this object's own descriptor; `exported` returns another
    one, which an importer may take over.
    """

    def __init__(self, nbytes: int, flags: int = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING) -> None:
        self.fd = os.memfd_create("test", flags)
        os.ftruncate(self.fd, nbytes)
        self.map = mmap.mmap(self.fd, nbytes)

    def exported(self) -> int:
        return os.dup(self.fd)

    def array(self, dtype: DTypeLike, offset: int = 0, count: int = -1) -> NDArray[Any]:
        """Return elements of the file from ``offset`` bytes on; changes of either are visible in the other."""
        return np.frombuffer(self.map, dtype, count, offset)

    def close(self) -> None:
        os.close(self.fd)

    def __enter__(self) -> SharedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Timeline(SharedFile):
    """A timeline semaphore of the emulated device, in ``nbytes`` bytes of memory."""

    def __init__(self, value: int = 0, magic: bytes = MAGIC, nbytes: int = 16) -> None:
        super().__init__(nbytes)
        self.map[:8] = magic
        self._value = ctypes.c_uint64.from_buffer(self.map, 8)
        self._value.value = value

    @property
    def value(self) -> int:
        return self._value.value

    def signal(self, value: int) -> None:
        self._value.value = value  # one store of 8 bytes

    def wait(self, value: int, seconds: float = 60) -> None:
        """Wait until the semaphore has at least this value. Raises TimeoutError."""
        end = time.monotonic() + seconds
        while self.value < value:
            if time.monotonic() > end:
                raise TimeoutError(f"the semaphore's value is {self.value} after {seconds} seconds, expected {value}")
            time.sleep(0.0005)


class ImportedTimeline:
    """A timeline that a device's driver has imported; enqueues waits and signals at the driver table."""

    def __init__(self, device: Device, file: SharedFile) -> None:
        self.device = device
        desc = ffi.new("CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC *", {"type": TIMELINE_SEMAPHORE_FD})
        desc.handle.fd = file.exported()
        self.handle = ffi.new("CUexternalSemaphore *")
        try:
            device.call("ImportExternalSemaphore", self.handle, desc)
        except CudaError:
            os.close(desc.handle.fd)
            raise

    def wait(self, stream: Stream, value: int) -> None:
        self._call("WaitExternalSemaphoresAsync", "CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS *", stream, value)

    def signal(self, stream: Stream, value: int) -> None:
        self._call("SignalExternalSemaphoresAsync", "CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS *", stream, value)

    def _call(self, member: str, kind: str, stream: Stream, value: int) -> None:
        params = ffi.new(kind)
        params.params.fence = value
        self.device.call(member, self.handle, params, 1, stream.handle)

    def destroy(self) -> None:
        self.device.call("DestroyExternalSemaphore", self.handle[0])


def descriptors() -> set[str]:
    """Return the open file descriptors of this process that refer to files in memory, without those of objects that
    only wait for garbage collection.
    """
    gc.collect()
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if "memfd:" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(name)
        except FileNotFoundError:
            pass
    return found


def mappings() -> int:
    """Return how many mappings of files in memory this process has, like `descriptors`."""
    gc.collect()
    with open("/proc/self/maps") as lines:
        return sum("memfd:test" in line for line in lines)
