"""Registrations of the library with ONNX Runtime, as Python sees them.

While ONNX Runtime registers the library, it holds a lock for which threads with the GIL may wait. So C makes the
factory, its devices and their memory infos without Python (``csrc_shim/ort/offer.h``), and Python queries them
afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..abi.core import check, core, ffi, new_error
from .device.devices import DeviceInfo
from .device.identity import Identity

#: The kinds of memory for which ORT may ask for an allocator: OCP_INFO_... of ``csrc_shim/ort/data/allocator.h``.
DEVICE_MEMORY, PINNED_MEMORY, INITIALIZER_MEMORY = range(3)

#: Initial capacity, in registrations, of the array that `registrations` passes to C. C returns the required capacity.
_FEW_REGISTRATIONS = 16


@dataclass(frozen=True)
class Registration:
    """A registration of the library that is in effect.

    Attributes:
        name: the registration name.
        identity: the name of the execution provider.
        devices: the offered devices, in order.
    """

    name: str
    identity: Identity
    devices: tuple[DeviceInfo, ...]


def registrations() -> list[Registration]:
    """Return the registrations of this process, the oldest first."""
    room = _FEW_REGISTRATIONS
    while True:
        found = ffi.new("ocp_registration[]", room)
        count = core().registrations(found, room)
        if count <= room:
            return [_registration(found[index]) for index in reversed(range(count))]
        room = count


def _registration(found: Any) -> Registration:
    devices = tuple(DeviceInfo.from_c(found.devices + index) for index in range(found.num_devices))
    return Registration(ffi.string(found.name).decode(errors="replace"), Identity(found.identity), devices)


@contextmanager
def requesting(emulate: bool | None, identity: Identity) -> Iterator[None]:
    """Within the block, this thread registers the library as ``identity``, with emulated devices if ``emulate``; None:
    as the environment says.
    """
    core().request_registration(-1 if emulate is None else emulate, identity)
    try:
        yield
    finally:
        core().request_registration(-1, -1)


def memory_info(info: DeviceInfo, kind: int = DEVICE_MEMORY) -> Any:
    """Return the ``const OrtMemoryInfo *`` of one kind of a device's memory. It lives as long as the process."""
    out, error = ffi.new("const OrtMemoryInfo **"), new_error()
    core().memory_info(info.emulated, info.ordinal, kind, out, error)
    check(error)
    return out[0]
