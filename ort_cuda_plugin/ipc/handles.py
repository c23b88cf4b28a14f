"""Handles of CUDA IPC that one process sends to another. The other process checks them: they may be damaged."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ..abi.core import core, driver_error_text, ffi, lib
from ..abi.device import CudaError, Device
from ..api import devices
from ..arrays import DLPACK_TYPES
from ..ep.device.devices import DeviceInfo
from ..model.ir import DType

HANDLE_BYTES = int(lib.CU_IPC_HANDLE_SIZE)
"""Bytes of a handle of the driver."""

DTYPES = {dtype.name.lower(): dtype for dtype in DLPACK_TYPES.values()}
"""Element types of shared tensors, by their names in handles: those that DLPack has."""

_MAX_BYTES = 1 << 48
"""Upper bound of the bytes of an allocation, larger than any device memory: a handle beyond it is damaged."""


@dataclass(frozen=True)
class MemoryHandle:
    """A tensor in device memory that `get_handle` has exported. It can be pickled.

    In the exporting process the handle keeps the tensor alive; a pickled copy does not.

    Attributes:
        memory: the driver's handle of the allocation, 64 bytes.
        offset: bytes from the start of the allocation to the tensor.
        shape: the tensor's dimensions.
        dtype: name of the element type, such as "float32" or "bfloat16".
        device: UUID of the device, 32 hexadecimal digits.

    Raises: ValueError: an attribute is wrong.
    """

    memory: bytes
    offset: int
    shape: tuple[int, ...]
    dtype: str
    device: str
    _owner: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_driver_handle("memory", self.memory)
        _check_uuid(self.device)
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:
            raise ValueError(f"dtype of the handle: got {self.dtype!r}, expected one of {', '.join(sorted(DTYPES))}")
        if not isinstance(self.shape, tuple) or not all(type(dim) is int and dim > 0 for dim in self.shape):
            raise ValueError(f"shape of the handle: got {self.shape!r}, expected a tuple of positive integers")
        itemsize = DTYPES[self.dtype].itemsize
        if type(self.offset) is not int or self.offset < 0 or self.offset % itemsize:
            raise ValueError(
                f"offset of the handle: got {self.offset!r}, expected 0 or a positive multiple of the element size, "
                f"{itemsize} bytes"
            )
        if self.offset + self.nbytes > _MAX_BYTES:
            raise ValueError(
                f"shape of the handle: {self.shape} at offset {self.offset} exceeds 2**48 bytes. Get a new handle from "
                "the exporting process"
            )

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tensor."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def element_type(self) -> DType:
        """Return the element type."""
        return DTYPES[self.dtype]

    def __reduce__(self) -> tuple[Any, ...]:
        return MemoryHandle, (self.memory, self.offset, self.shape, self.dtype, self.device)


@dataclass(frozen=True)
class EventHandle:
    """An `Event` that another process can open. It can be pickled.

    Attributes:
        event: the driver's handle, 64 bytes.
        device: UUID of the device, 32 hexadecimal digits.

    Raises: ValueError: an attribute is wrong.
    """

    event: bytes
    device: str

    def __post_init__(self) -> None:
        _check_driver_handle("event", self.event)
        _check_uuid(self.device)


def _check_driver_handle(name: str, handle: object) -> None:
    if not isinstance(handle, bytes) or len(handle) != HANDLE_BYTES:
        found = f"{len(handle)} bytes" if isinstance(handle, bytes) else type(handle).__name__
        raise ValueError(f"{name} of the handle: got {found}, expected {HANDLE_BYTES} bytes")


def _check_uuid(uuid: object) -> None:
    if not isinstance(uuid, str) or len(uuid) != 32 or set(uuid) - set("0123456789abcdef"):
        raise ValueError(f"device of the handle: got {uuid!r}, expected a UUID of 32 hexadecimal digits")


# ---- devices ----


def device_of_info(info: DeviceInfo) -> Device:
    """Open a device for calls of its driver. Raises CudaError."""
    return Device.emulated(info.ordinal) if info.emulated else Device.cuda(info.ordinal)


def driver_call(device: Device, member: str, *arguments: Any, advice: str = "") -> None:
    """Call a member of the device's driver table. The CudaError names CUDA's function, and ends with the advice."""
    try:
        device.call(member, *arguments)
    except CudaError as error:
        text = str(error).removeprefix(f"{error.call}: ")
        raise CudaError(f"cu{error.call}", error.code, f"{text}. {advice}" if advice else text) from None


def uuid_of(device: Device) -> str:
    """Return the UUID of a device, which is the same in all processes. Raises CudaError."""
    uuid = ffi.new("CUuuid *")
    driver_call(device, "DeviceGetUuid", uuid, device.handle)
    return bytes(ffi.buffer(uuid)).hex()


def find_uuid(uuid: str) -> DeviceInfo:
    """Return the device of a handle.

    Raises:
        ValueError: this process does not have the device.
        CudaError: no known UUID matches, and the driver failed to return that of some device.
    """
    known = devices()
    failed: CudaError | None = None
    for info in known:
        try:
            if _uuid_without_context(info) == uuid:
                return info
        except CudaError as error:
            failed = error
    if failed is not None:
        raise failed
    names = ", ".join(f"{info.ordinal} ({info.name})" for info in known) or "none"
    raise ValueError(
        f"device of the handle: no device of this process has the UUID {uuid}. Known devices: {names}. Make the "
        "exporter's device visible (CUDA_VISIBLE_DEVICES, or ORT_CUDA_PLUGIN_EMULATE for emulated devices)"
    )


def _uuid_without_context(info: DeviceInfo) -> str:
    """Return the UUID of a device; creates no context. Raises CudaError."""
    driver = core().driver_emulator() if info.emulated else core().driver_cuda(ffi.NULL)
    handle, uuid = ffi.new("CUdevice *"), ffi.new("CUuuid *")
    if code := driver.DeviceGet(handle, info.ordinal):
        raise CudaError("cuDeviceGet", code, driver_error_text(driver, code))
    if code := driver.DeviceGetUuid(uuid, handle[0]):
        raise CudaError("cuDeviceGetUuid", code, driver_error_text(driver, code))
    return bytes(ffi.buffer(uuid)).hex()
